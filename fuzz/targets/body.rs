#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fornax_fuzz::body(data));
