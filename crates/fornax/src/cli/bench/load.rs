//! Requests that are sent at their times, and when each of their tokens came: what the figures of `bench` are made of.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use fornax::{Error, Sampling};
use fornax_compute::SplitMix64;
use fornax_engine::{Event, Handle, Request};
use serde::Serialize;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use super::wire::Wire;
use crate::cli::interrupt::Interrupt;

/// Threads that clients share: they only note times.
const CLIENT_THREADS: usize = 2;

/// How often it is asked whether to go on.
const LOOK_UP: Duration = Duration::from_millis(50);

/// A request, and when it is sent.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    /// After the first one.
    pub(super) at: Duration,
    pub(super) prompt: Vec<u32>,
    /// How many tokens the answer has.
    pub(super) tokens: usize,
    pub(super) seed: u64,
}

/// What a client saw.
#[derive(Clone, Debug)]
pub(super) struct Timeline {
    pub(super) sent: Instant,
    /// When something came; at least one token each time.
    pub(super) came: Vec<Instant>,
    /// Tokens in all.
    pub(super) tokens: usize,
    /// Tokens of the prompt that the engine found in its cache; a server is not asked.
    pub(super) cached_tokens: usize,
}

/// Who is asked.
#[derive(Clone)]
pub(super) enum Target {
    /// The engine itself.
    Engine(Handle),
    /// A server, over a socket.
    Server(Wire),
}

/// Clients on threads of their own.
pub(super) struct Clients {
    runtime: Runtime,
}

impl Clients {
    pub(super) fn new() -> anyhow::Result<Clients> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(CLIENT_THREADS)
            .thread_name("bench-client")
            .enable_all()
            .build()
            .context("cannot start clients")?;
        Ok(Clients { runtime })
    }

    /// Sends every request at its time and waits for all answers, in the order of the requests. None is late because
    /// another one is: whoever asks does not wait for whoever asked before.
    pub(super) fn run(
        &self,
        target: &Target,
        asks: &[Ask],
        interrupt: &Interrupt,
    ) -> anyhow::Result<Vec<Timeline>> {
        let run = async {
            let mut answers = JoinSet::new();
            let start = tokio::time::Instant::now();
            for (index, ask) in asks.iter().cloned().enumerate() {
                let target = target.clone();
                answers.spawn(async move {
                    tokio::time::sleep_until(start + ask.at).await;
                    target.ask(ask).await.map(|timeline| (index, timeline))
                });
            }
            let mut timelines = Vec::with_capacity(asks.len());
            while let Some(answer) = answers.join_next().await {
                timelines.push(answer.context("a client broke")??);
            }
            timelines.sort_by_key(|(index, _)| *index);
            anyhow::Ok(timelines.into_iter().map(|(_, timeline)| timeline).collect())
        };
        self.runtime.block_on(async {
            tokio::select! {
                timelines = run => timelines,
                () = stopped(interrupt) => Err(Error::Cancelled.into()),
            }
        })
    }

    /// Where they run, for what else has to wait on sockets.
    pub(super) fn runtime(&self) -> &Runtime {
        &self.runtime
    }
}

async fn stopped(interrupt: &Interrupt) {
    while !interrupt.asked() {
        tokio::time::sleep(LOOK_UP).await;
    }
}

impl Target {
    async fn ask(&self, ask: Ask) -> anyhow::Result<Timeline> {
        match self {
            Target::Engine(handle) => ask_engine(handle, ask).await,
            Target::Server(wire) => wire.ask(&ask).await,
        }
    }
}

async fn ask_engine(handle: &Handle, ask: Ask) -> anyhow::Result<Timeline> {
    let Ask { prompt, tokens, seed, .. } = ask;
    // At a temperature: what a random model says greedily repeats itself, which is not what models are for. Nothing
    // ends an answer before its length.
    let sampling = Sampling { temperature: 1.0, ..Sampling::greedy() };
    let sent = Instant::now();
    let mut replies = handle.submit(Request { seed, ..Request::new(prompt, tokens, sampling) })?;
    let (mut came, mut cached_tokens) = (Vec::with_capacity(tokens), 0);
    for reply in &mut replies {
        while let Some(event) = reply.next().await {
            match event {
                Event::Started { cached_tokens: cached, .. } => cached_tokens = cached,
                Event::Token { .. } => came.push(Instant::now()),
                Event::Failed(failure) => return Err(Error::Engine(failure).into()),
                _ => {}
            }
        }
    }
    let tokens = came.len();
    Ok(Timeline { sent, came, tokens, cached_tokens })
}

/// Times between requests that arrive at random at a rate: a Poisson process, the same for the same seed.
pub(super) fn arrivals(rate: f64, count: usize, random: &mut SplitMix64) -> Vec<Duration> {
    let gaps = (0..count).map(|_| -(1.0 - uniform(random)).ln() / rate);
    let times = gaps.scan(0.0, |now, gap| {
        let at = *now;
        *now += gap;
        Some(Duration::from_secs_f64(at))
    });
    times.collect()
}

/// From 0 to 1, 1 excluded.
fn uniform(random: &mut SplitMix64) -> f64 {
    (random.bits() >> 11) as f64 / (1u64 << 53) as f64
}

/// A whole number from `least` to `most`.
pub(super) fn between(least: usize, most: usize, random: &mut SplitMix64) -> usize {
    least + (random.bits() % (most - least + 1) as u64) as usize
}

/// Tokens a second of all streams together while every one of them runs: from the first token of the last to begin
/// until the first is done. Where that is no time at all, from the first token of all to the last.
pub(super) fn steady_rate(timelines: &[Timeline]) -> f64 {
    let begun = timelines.iter().filter_map(|timeline| timeline.came.first()).max();
    let ended = timelines.iter().filter_map(|timeline| timeline.came.last()).min();
    let all: Vec<Instant> = timelines.iter().flat_map(|timeline| timeline.came.iter().copied()).collect();
    let (first, last) = (all.iter().min(), all.iter().max());
    let window = |from: Option<&Instant>, to: Option<&Instant>| {
        let (from, to) = (*from?, *to?);
        let count = all.iter().filter(|&&came| came > from && came <= to).count();
        (count > 0).then(|| count as f64 / to.duration_since(from).as_secs_f64().max(f64::MIN_POSITIVE))
    };
    let tokens: usize = timelines.iter().map(|timeline| timeline.tokens).sum();
    let each = tokens as f64 / all.len().max(1) as f64;
    window(begun, ended).or_else(|| window(first, last)).unwrap_or(0.0) * each
}

/// What half, nine tenths and all but one in a hundred do not exceed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Percentiles {
    pub(super) p50: f64,
    pub(super) p90: f64,
    pub(super) p99: f64,
}

impl Percentiles {
    /// Of milliseconds; none of nothing.
    pub(super) fn of(mut times: Vec<Duration>) -> Option<Percentiles> {
        times.sort_unstable();
        let at = |share: usize| {
            let rank = (times.len() * share).div_ceil(100).max(1);
            times.get(rank - 1).map(|time| time.as_secs_f64() * 1e3)
        };
        Some(Percentiles { p50: at(50)?, p90: at(90)?, p99: at(99)? })
    }

    /// Until the first token came.
    pub(super) fn first_token(timelines: &[Timeline]) -> Option<Percentiles> {
        let first = |timeline: &Timeline| Some(timeline.came.first()?.duration_since(timeline.sent));
        Percentiles::of(timelines.iter().filter_map(first).collect())
    }

    /// Between a token and the next one of the same answer.
    pub(super) fn between_tokens(timelines: &[Timeline]) -> Option<Percentiles> {
        let gaps = |timeline: &Timeline| {
            timeline.came.windows(2).map(|pair| pair[1].duration_since(pair[0])).collect::<Vec<_>>()
        };
        Percentiles::of(timelines.iter().flat_map(gaps).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(start: Instant, came: &[u64], tokens: usize) -> Timeline {
        let came = came.iter().map(|&ms| start + Duration::from_millis(ms)).collect();
        Timeline { sent: start, came, tokens, cached_tokens: 0 }
    }

    #[test]
    fn only_the_time_when_all_streams_run_counts() {
        let start = Instant::now();
        let check = |streams: &[&[u64]], tokens_each: usize, wanted: f64| {
            let timelines: Vec<_> =
                streams.iter().map(|came| timeline(start, came, came.len() * tokens_each)).collect();
            let got = steady_rate(&timelines);
            assert!((got - wanted).abs() < 1e-6 * wanted.max(1.0), "{streams:?}: {got}, not {wanted}");
        };
        // One every 10 ms.
        check(&[&[0, 10, 20, 30]], 1, 100.0);
        // The second begins at 20 and the first ends at 30: one token each in 10 ms.
        check(&[&[0, 10, 20, 30], &[20, 30, 40]], 1, 200.0);
        // They never run together: five tokens after the first, in 50 ms.
        check(&[&[0, 10, 20], &[30, 40, 50]], 1, 100.0);
        // Two tokens came each time.
        check(&[&[0, 10, 20, 30]], 2, 200.0);
        check(&[&[5]], 1, 0.0);
        check(&[], 1, 0.0);
    }

    #[test]
    fn percentiles_are_what_was_measured() {
        let ms = |times: &[u64]| times.iter().map(|&ms| Duration::from_millis(ms)).collect::<Vec<_>>();
        let hundred: Vec<u64> = (1..=100).rev().collect();
        let of = |times: &[u64]| Percentiles::of(ms(times));
        assert_eq!(of(&hundred), Some(Percentiles { p50: 50.0, p90: 90.0, p99: 99.0 }));
        assert_eq!(of(&[7]), Some(Percentiles { p50: 7.0, p90: 7.0, p99: 7.0 }));
        assert_eq!(of(&[3, 1]), Some(Percentiles { p50: 1.0, p90: 3.0, p99: 3.0 }));
        assert_eq!(of(&[]), None);
        let start = Instant::now();
        let seen = [timeline(start, &[5, 6, 8], 3), timeline(start, &[9], 1)];
        assert_eq!(Percentiles::first_token(&seen).map(|first| (first.p50, first.p90)), Some((5.0, 9.0)));
        assert_eq!(Percentiles::between_tokens(&seen).map(|gaps| (gaps.p50, gaps.p90)), Some((1.0, 2.0)));
    }

    #[test]
    fn arrivals_have_their_rate_and_are_the_same_for_a_seed() {
        let times = arrivals(50.0, 4000, &mut SplitMix64(3));
        assert_eq!(times, arrivals(50.0, 4000, &mut SplitMix64(3)));
        assert_ne!(times, arrivals(50.0, 4000, &mut SplitMix64(4)));
        assert_eq!(times[0], Duration::ZERO);
        let gaps: Vec<f64> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let square = gaps.iter().map(|gap| gap * gap).sum::<f64>() / gaps.len() as f64;
        assert!((0.019..0.021).contains(&mean), "{mean}");
        // An exponential distribution's second moment is twice the square of its mean.
        assert!((1.8..2.2).contains(&(square / mean / mean)), "{square}");
    }
}
