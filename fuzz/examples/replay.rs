//! Runs a target over the files of some directories, once each: `replay TARGET DIRECTORY…`.
//!
//! Built with any compiler, so that the coverage of a corpus can be measured without libFuzzer.

use std::error::Error;
use std::fs;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let target = match arguments.next().as_deref() {
        Some("gguf") => fornax_fuzz::gguf,
        Some("safetensors") => fornax_fuzz::safetensors,
        Some("template") => fornax_fuzz::template,
        Some("tokenizer") => fornax_fuzz::tokenizer,
        Some("body") => fornax_fuzz::body,
        Some("form") => fornax_fuzz::form,
        Some("frame") => fornax_fuzz::frame,
        Some("adapter") => fornax_fuzz::adapter,
        _ => return Err("usage: replay TARGET DIRECTORY…".into()),
    };
    let mut count = 0;
    for directory in arguments {
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            if path.is_file() {
                target(&fs::read(path)?);
                count += 1;
            }
        }
    }
    println!("{count} files replayed");
    Ok(())
}
