//! What a form costs: answers of the same length, free and as the inside of a JSON string, alone and eight at a time,
//! by turns. `cargo run --release -p fornax --example forms -- MODEL [ROUNDS]`
#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::{ops::ControlFlow, time::Instant};

use anyhow::{Context, Result};
use fornax::{Form, OpenOptions, Prompt, Request, Sampling};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().context("which model?")?;
    let rounds: usize = arguments.next().map_or(Ok(5), |rounds| rounds.parse())?;
    let model = OpenOptions::new(&path).context(1024).parallel(8).drafts(false).open()?;
    // What is inside a JSON string: it has the largest masks, and may end wherever the answer is cut.
    let form = Form::Regex(r#"([^"\\\x00-\x1F]|\\["\\/bfnrt])*"#.to_owned());
    let text = "A story inside a JSON string:".to_owned();
    for streams in [1, 8] {
        let rate = |form: Option<&Form>| -> Result<f64> {
            let request = Request {
                max_tokens: Some(64),
                ignore_eos: true,
                choices: streams,
                seed: Some(1),
                form: form.cloned(),
                sampling: Sampling { temperature: 1.0, ..Sampling::greedy() },
                ..Request::new(Prompt::Text { text: text.clone(), special: false })
            };
            let start = Instant::now();
            let answers = model.complete_all(&request, &mut || ControlFlow::Continue(()))?;
            let tokens: usize = answers.iter().map(|answer| answer.tokens.len()).sum();
            Ok(tokens as f64 / start.elapsed().as_secs_f64())
        };
        // The first one compiles the form.
        rate(Some(&form))?;
        let (mut free, mut formed) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            free.push(rate(None)?);
            formed.push(rate(Some(&form))?);
        }
        let (free, formed) = (median(free), median(formed));
        println!(
            "{streams} streams: {free:.0} tokens/s free, {formed:.0} in form, ratio {:.2}",
            formed / free
        );
    }
    Ok(())
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}
