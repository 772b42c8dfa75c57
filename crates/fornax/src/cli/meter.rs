//! Progress of long work: a bar on a terminal, plain lines elsewhere, nothing for what is over at once.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// How often a line is printed where there is no terminal.
const LINES_EVERY: Duration = Duration::from_secs(10);

/// Shows how far some work is, on standard error.
pub(crate) struct Meter {
    bar: Option<ProgressBar>,
    /// Nothing is shown before this.
    from: Instant,
    /// The last line that was printed: when, and of what.
    last: Option<(Instant, String)>,
}

impl Meter {
    /// Shows nothing for work that ends within `patience`.
    pub(crate) fn new(patience: Duration) -> Meter {
        let bar = io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{msg} [{bar:32}] {eta}");
            ProgressBar::no_length().with_style(style.expect("the template is constant; a test parses it"))
        });
        Meter { bar, from: Instant::now() + patience, last: None }
    }

    /// `done` of `total` is done of `what`; `amount` says it in words. Where the total is not known it is 0.
    pub(crate) fn show(&mut self, what: &str, (done, total): (u64, u64), amount: &str) {
        let now = Instant::now();
        if now < self.from {
            return;
        }
        if let Some(bar) = &self.bar {
            match total {
                0 => bar.unset_length(),
                _ => bar.set_length(total),
            }
            bar.set_position(done);
            bar.set_message(format!("{what} {amount}"));
            return;
        }
        if self
            .last
            .as_ref()
            .is_some_and(|(at, shown)| shown == what && now.duration_since(*at) < LINES_EVERY)
        {
            return;
        }
        self.last = Some((now, what.to_owned()));
        // Progress that nobody can read must not stop the work.
        drop(writeln!(io::stderr(), "{what} {amount}"));
    }
}

impl Meter {
    /// Says something that stays, above the bar where there is one.
    pub(crate) fn line(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            None => drop(writeln!(io::stderr(), "{line}")),
        }
    }
}

/// How fast something goes, over all of its time: a figure that does not jump.
pub(crate) struct Rate {
    since: Instant,
}

/// A rate of less than this is a guess.
const RATE_FROM: Duration = Duration::from_millis(500);

impl Rate {
    pub(crate) fn new() -> Rate {
        Rate { since: Instant::now() }
    }

    /// `, 12.3 MB/s, 40 s left`, once it can be told.
    pub(crate) fn words(&mut self, done: u64, total: u64) -> String {
        let elapsed = self.since.elapsed();
        if elapsed < RATE_FROM || done == 0 {
            return String::new();
        }
        rate_words(done as f64 / elapsed.as_secs_f64(), total.saturating_sub(done))
    }
}

fn rate_words(bytes_per_second: f64, left: u64) -> String {
    let seconds = (left as f64 / bytes_per_second).ceil();
    let left = match seconds {
        seconds if seconds < 120.0 => format!("{seconds:.0} s"),
        seconds if seconds < 7200.0 => format!("{:.0} min", seconds / 60.0),
        seconds => format!("{:.1} h", seconds / 3600.0),
    };
    format!(", {:.1} MB/s, {left} left", bytes_per_second / 1e6)
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// An amount of bytes in words.
pub(crate) fn megabytes(done: u64, total: u64) -> String {
    format!("{:.0} of {:.0} MB", done as f64 / 1e6, total as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_can_be_made() {
        assert!(ProgressStyle::with_template("{msg} [{bar:32}] {eta}").is_ok());
    }

    #[test]
    fn a_rate_says_when_it_will_be_done() {
        assert_eq!(rate_words(2e6, 100_000_000), ", 2.0 MB/s, 50 s left");
        assert_eq!(rate_words(1e6, 600_000_000), ", 1.0 MB/s, 10 min left");
        assert_eq!(rate_words(1e5, 3_600_000_000), ", 0.1 MB/s, 10.0 h left");
    }

    #[test]
    fn lines_are_printed_once_for_each_kind_of_work() {
        let mut meter = Meter { bar: None, from: Instant::now(), last: None };
        meter.show("reading", (1, 10), &megabytes(1_000_000, 10_000_000));
        let first = meter.last.clone();
        meter.show("reading", (2, 10), "");
        assert_eq!(meter.last, first);
        meter.show("checking", (1, 10), "");
        assert_ne!(meter.last, first);
    }
}
