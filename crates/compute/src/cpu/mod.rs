//! The CPU backend: scalar code that is the specification, and vector code chosen at run time.

#[expect(dead_code, unused_imports, reason = "the backend that calls it lands next; it then drops this line")]
mod quant;
