//! What drafts gain: the same greedy answers with and without them, by turns.
//! `cargo run --release -p fornax --example drafts -- MODEL [ROUNDS [DRAFT]]`, where DRAFT is a model that drafts.
#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]

use anyhow::{Context, Result, ensure};
use fornax::{Fornax, OpenOptions, Prompt, Request, Sampling};

/// A text that an answer repeats, and one that it does not.
const PROMPTS: [(&str, &str); 2] = [
    (
        "repeating",
        "The list: red apple, green pear, yellow plum, blue grape, red apple, green pear, yellow plum, blue grape, \
         red apple, green pear, yellow plum, blue grape,",
    ),
    ("plain", "My favourite book is about a ship that sails around the world. It begins"),
];

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().context("which model?")?;
    let rounds: usize = arguments.next().map_or(Ok(5), |rounds| rounds.parse())?;
    let open = |drafts| OpenOptions::new(&path).context(1024).drafts(drafts);
    let with = match arguments.next() {
        Some(draft) => open(true).draft(draft).open()?,
        None => open(true).open()?,
    };
    let without = open(false).open()?;
    for (name, text) in PROMPTS {
        let request = Request {
            max_tokens: Some(128),
            ignore_eos: true,
            sampling: Sampling::greedy(),
            ..Request::new(Prompt::Text { text: text.to_owned(), special: false })
        };
        let answer = |model: &Fornax| -> Result<(Vec<u32>, f64)> {
            let completion = model.generate(&request)?;
            let rate = (completion.tokens.len() - 1) as f64 / completion.timings.decode.as_secs_f64();
            Ok((completion.tokens, rate))
        };
        let (mut faster, mut plain) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let ((tokens, rate), (same, rate_without)) = (answer(&with)?, answer(&without)?);
            ensure!(tokens == same, "drafts changed the answer");
            faster.push(rate);
            plain.push(rate_without);
        }
        let (faster, plain) = (median(faster), median(plain));
        println!("{name}: {faster:.0} tokens/s with drafts, {plain:.0} without, ratio {:.2}", faster / plain);
    }
    let stats = with.stats();
    println!("{} of {} drafted tokens were right", stats.accepted_tokens, stats.drafted_tokens);
    if let Some(model) = stats.draft_model {
        let (right, drafted, busy) = (model.accepted_tokens, model.drafted_tokens, model.busy);
        println!("{right} of {drafted} by the model that drafts, in {:.2} s", busy.as_secs_f64());
    }
    Ok(())
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}
