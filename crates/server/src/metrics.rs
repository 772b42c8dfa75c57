//! What is counted, and the page that Prometheus reads.

use std::{
    collections::BTreeMap,
    fmt::{Display, Write},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use fornax_compute::PAGE_TOKENS;
use fornax_jobs::{Counts, State};

use crate::{answer::Finish, error::Code, served::Served, trace::Traces};

/// Upper bounds of buckets, in seconds: vLLM's, so that its dashboards fit.
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
const BETWEEN_TOKENS: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const WHOLE: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];

/// Everything the server counts itself; the rest it asks the engine.
pub(crate) struct Metrics {
    pub(crate) time_to_first_token: Histogram,
    pub(crate) inter_token_latency: Histogram,
    pub(crate) request_latency: Histogram,
    pub(crate) queue_time: Histogram,
    stop: AtomicU64,
    length: AtomicU64,
    abort: AtomicU64,
    /// Bounded by the number of codes.
    failures: Mutex<BTreeMap<Code, u64>>,
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        Metrics {
            time_to_first_token: Histogram::new(FIRST_TOKEN),
            inter_token_latency: Histogram::new(BETWEEN_TOKENS),
            request_latency: Histogram::new(WHOLE),
            queue_time: Histogram::new(WHOLE),
            stop: AtomicU64::new(0),
            length: AtomicU64::new(0),
            abort: AtomicU64::new(0),
            failures: Mutex::new(BTreeMap::new()),
        }
    }

    /// An answer ended.
    pub(crate) fn ended(&self, finish: Finish) {
        let counter = match finish {
            Finish::End | Finish::Stop(_) => &self.stop,
            Finish::Length | Finish::Truncated => &self.length,
            Finish::Cancelled => &self.abort,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// A request failed.
    pub(crate) fn failed(&self, code: Code) {
        // Short and rare; a message to a counting task would cost more.
        *self.failures.lock().unwrap_or_else(PoisonError::into_inner).entry(code).or_default() += 1;
    }

    /// The page, in Prometheus' text format. Before a model is loaded it holds only the server's own counts.
    pub(crate) fn page(
        &self,
        served: Option<&Served>,
        traces: Option<&Traces>,
        jobs: Option<Counts>,
    ) -> String {
        let mut page = Page::default();
        if let Some(served) = served {
            self.vllm(&mut page, served);
            for device in &served.devices {
                for (purpose, bytes) in &device.bytes {
                    let labels = format!("device=\"{}\",purpose=\"{purpose}\"", escaped(&device.name));
                    page.sample("fornax_device_bytes", "gauge", "Device memory by purpose.", &labels, bytes);
                }
            }
            let seconds = served.load_seconds;
            page.sample("fornax_load_seconds", "gauge", "How long loading the model took.", "", seconds);
        }
        for state in jobs.iter().flat_map(|_| State::ALL) {
            let labels = format!("state=\"{}\"", state.name());
            let count = jobs.map_or(0, |counts| counts.of(state));
            page.sample("fornax_jobs", "gauge", "Durable jobs by state.", &labels, count);
        }
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (code, count) in failures {
            let labels = format!("code=\"{}\"", code.name());
            page.sample("fornax_failures_total", "counter", "Requests that failed.", &labels, count);
        }
        if let Some(traces) = traces {
            let dropped = traces.dropped();
            page.sample(
                "fornax_spans_dropped_total",
                "counter",
                "Spans that no collector took.",
                "",
                dropped,
            );
        }
        page.text
    }

    fn vllm(&self, page: &mut Page, served: &Served) {
        let stats = served.engine.stats();
        let labels = format!("engine=\"0\",model_name=\"{}\"", escaped(&served.card.name));
        let total: usize = stats.pages.iter().map(|group| group.total).sum();
        let used: usize = stats.pages.iter().map(|group| group.referenced).sum();
        let usage = if total == 0 { 0.0 } else { used as f64 / total as f64 };

        page.sample("vllm:num_requests_running", "gauge", "Requests being computed.", &labels, stats.running);
        let waiting = stats.requests_waiting + stats.preempted;
        page.sample(
            "vllm:num_requests_waiting",
            "gauge",
            "Requests waiting to be computed.",
            &labels,
            waiting,
        );
        page.sample("vllm:kv_cache_usage_perc", "gauge", "Share of KV pages in use, 0 to 1.", &labels, usage);
        let config = format!("{labels},block_size=\"{PAGE_TOKENS}\",num_gpu_blocks=\"{total}\"");
        page.sample("vllm:cache_config_info", "gauge", "The KV cache.", &config, 1);
        let mut count = |name, help, value: u64| page.sample(name, "counter", help, &labels, value);
        count("vllm:prompt_tokens_total", "Prompt tokens of requests begun.", stats.prefix_queries);
        count("vllm:generation_tokens_total", "Tokens chosen.", stats.generated_tokens);
        count("vllm:num_preemptions_total", "Requests put back for others.", stats.preemptions);
        count("vllm:prefix_cache_queries_total", "Prompt tokens looked up.", stats.prefix_queries);
        count("vllm:prefix_cache_hits_total", "Prompt tokens found computed.", stats.prefix_hits);
        for (reason, counter) in [("stop", &self.stop), ("length", &self.length), ("abort", &self.abort)] {
            let labels = format!("{labels},finished_reason=\"{reason}\"");
            let count = counter.load(Ordering::Relaxed);
            page.sample(
                "vllm:request_success_total",
                "counter",
                "Answers by how they ended.",
                &labels,
                count,
            );
        }
        let mut histogram =
            |name, help, histogram: &Histogram| page.histogram(name, help, &labels, histogram);
        histogram(
            "vllm:time_to_first_token_seconds",
            "From arrival to the first token.",
            &self.time_to_first_token,
        );
        histogram("vllm:inter_token_latency_seconds", "Between tokens.", &self.inter_token_latency);
        histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", &self.request_latency);
        histogram("vllm:request_queue_time_seconds", "From arrival to being computed.", &self.queue_time);
    }
}

/// Counts of durations, in buckets.
pub(crate) struct Histogram {
    bounds: &'static [f64],
    /// One per bound, and one beyond.
    counts: Vec<AtomicU64>,
    sum_us: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Histogram {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { bounds, counts, sum_us: AtomicU64::new(0) }
    }

    /// Counts one duration.
    pub(crate) fn observe(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = self.bounds.partition_point(|bound| *bound < seconds);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        let microseconds = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        self.sum_us.fetch_add(microseconds, Ordering::Relaxed);
    }
}

/// A page of metrics being written. Samples of one metric follow each other.
#[derive(Default)]
struct Page {
    text: String,
    last: &'static str,
}

impl Page {
    fn head(&mut self, name: &'static str, kind: &str, help: &str) {
        if self.last != name {
            self.last = name;
            self.line(format_args!("# HELP {name} {help}"));
            self.line(format_args!("# TYPE {name} {kind}"));
        }
    }

    fn sample(&mut self, name: &'static str, kind: &str, help: &str, labels: &str, value: impl Display) {
        self.head(name, kind, help);
        match labels.is_empty() {
            true => self.line(format_args!("{name} {value}")),
            false => self.line(format_args!("{name}{{{labels}}} {value}")),
        }
    }

    fn histogram(&mut self, name: &'static str, help: &str, labels: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        let mut sum = 0;
        for (index, count) in histogram.counts.iter().enumerate() {
            sum += count.load(Ordering::Relaxed);
            match histogram.bounds.get(index) {
                Some(bound) => self.line(format_args!("{name}_bucket{{{labels},le=\"{bound:?}\"}} {sum}")),
                None => self.line(format_args!("{name}_bucket{{{labels},le=\"+Inf\"}} {sum}")),
            }
        }
        let seconds = histogram.sum_us.load(Ordering::Relaxed) as f64 / 1e6;
        self.line(format_args!("{name}_sum{{{labels}}} {seconds}"));
        self.line(format_args!("{name}_count{{{labels}}} {sum}"));
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{line}").expect("a string takes everything");
    }
}

fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_counts_into_the_first_bucket_that_holds_the_value() {
        let histogram = Histogram::new(&[0.1, 1.0]);
        for milliseconds in [50, 100, 101, 1000, 5000] {
            histogram.observe(Duration::from_millis(milliseconds));
        }
        let mut page = Page::default();
        page.histogram("h", "Help.", "a=\"b\"", &histogram);
        insta::assert_snapshot!(page.text, @r##"
        # HELP h Help.
        # TYPE h histogram
        h_bucket{a="b",le="0.1"} 2
        h_bucket{a="b",le="1.0"} 4
        h_bucket{a="b",le="+Inf"} 5
        h_sum{a="b"} 6.251
        h_count{a="b"} 5
        "##);
    }

    #[test]
    fn labels_cannot_break_out() {
        assert_eq!(escaped("a\"b\\c\nd"), r#"a\"b\\c\nd"#);
    }
}
