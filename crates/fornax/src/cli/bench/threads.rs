//! One model on several numbers of threads, and which of them is the best for what.

use std::fmt::Write as _;

use serde::Serialize;

use super::Report;

/// What `--json` prints of several numbers of threads.
#[derive(Debug, Serialize)]
pub(super) struct Compared {
    runs: Vec<Report>,
    best: Vec<Best>,
}

/// The best number of threads for one thing that was measured.
#[derive(Debug, PartialEq, Serialize)]
struct Best {
    what: String,
    threads: usize,
    tokens_per_second: f64,
}

impl Compared {
    pub(super) fn new(runs: Vec<Report>) -> Compared {
        let rates = runs.iter().map(|run| (run.device.threads, run.figures.rates()));
        Compared { best: best(rates), runs }
    }

    /// For people, below the reports.
    pub(super) fn table(&self) -> Result<String, std::fmt::Error> {
        let mut out = format!("\n{:<20} {:>7} {:>10}\n", "best", "threads", "tok/s");
        for Best { what, threads, tokens_per_second } in &self.best {
            writeln!(out, "{what:<20} {threads:>7} {tokens_per_second:>10.1}")?;
        }
        Ok(out)
    }
}

/// Of each thing that was measured with every number of threads; of equal ones the fewest.
fn best(runs: impl Iterator<Item = (usize, Vec<(String, f64)>)>) -> Vec<Best> {
    let mut all: Vec<Best> = Vec::new();
    for (threads, rates) in runs {
        for (what, tokens_per_second) in rates {
            match all.iter_mut().find(|best| best.what == what) {
                None => all.push(Best { what, threads, tokens_per_second }),
                Some(best) => {
                    let (before, now) = (best.tokens_per_second, tokens_per_second);
                    if now > before || (now == before && threads < best.threads) {
                        *best = Best { what, threads, tokens_per_second };
                    }
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_number_of_threads_is_that_of_the_most_tokens_a_second() {
        let run = |threads: usize, prefill: f64, decode: f64| {
            (threads, vec![("prefill 512".to_owned(), prefill), ("decode 1 stream".to_owned(), decode)])
        };
        let best = best(
            [run(2, 100.0, 30.0), run(16, 700.0, 45.0), run(8, 400.0, 50.0), run(4, 50.0, 50.0)].into_iter(),
        );
        let found: Vec<_> =
            best.iter().map(|best| (&*best.what, best.threads, best.tokens_per_second)).collect();
        assert_eq!(found, [("prefill 512", 16, 700.0), ("decode 1 stream", 4, 50.0)]);
    }
}
