//! Memory, Backend, Batch and Step; the CPU backend; the conformance suite.
