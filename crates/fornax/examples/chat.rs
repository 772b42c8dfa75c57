//! A chat in the process itself: questions line by line, answers as they come.
//! `cargo run --release -p fornax --example chat -- MODEL`
#![expect(clippy::print_stdout, reason = "an example talks")]

use std::io::{BufRead, Write};
use std::ops::ControlFlow;

use anyhow::{Context, Result};
use fornax::{Message, OpenOptions, Request, Sampling};

fn main() -> Result<()> {
    let path = std::env::args().nth(1).context("which model?")?;
    let model = OpenOptions::new(path).context(4096).open()?;
    let sampling = Sampling { temperature: 0.7, ..Sampling::greedy() };
    let mut messages = Vec::new();
    for line in std::io::stdin().lock().lines() {
        messages.push(Message::user(line?));
        let question = Request { sampling: sampling.clone(), ..Request::chat(messages.clone()) };
        let answer = model.stream(&question, |text| {
            print!("{text}");
            // A terminal that is gone stops the answer.
            if std::io::stdout().flush().is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        println!();
        messages.push(Message::assistant(answer.text));
    }
    Ok(())
}
