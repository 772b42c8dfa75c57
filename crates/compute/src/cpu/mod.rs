//! The CPU backend: scalar code that is the specification, and vector code chosen at run time.
