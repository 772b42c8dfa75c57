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

use fornax_chat::Finish;
use fornax_compute::PAGE_TOKENS;
use fornax_engine::{Stats, TierStats};
use fornax_jobs::{Counts, State as JobState};

use crate::{
    error::Code,
    models::{Slot, Standing, State},
    trace::Traces,
};

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

/// What the server counts of one model, over all its loads; the rest it asks the engine.
pub(crate) struct ModelMetrics {
    pub(crate) time_to_first_token: Histogram,
    pub(crate) inter_token_latency: Histogram,
    pub(crate) request_latency: Histogram,
    pub(crate) queue_time: Histogram,
    stop: AtomicU64,
    length: AtomicU64,
    abort: AtomicU64,
    loads: AtomicU64,
    load_failures: AtomicU64,
    /// How long the last load took.
    load_us: AtomicU64,
    /// What engines counted that are gone, so that no counter goes back.
    past: Mutex<Totals>,
}

/// What an engine counts from its start on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Totals {
    prefix_queries: u64,
    prefix_hits: u64,
    prefix_restored: u64,
    generated_tokens: u64,
    preemptions: u64,
    drafted_tokens: u64,
    accepted_tokens: u64,
    drafted_by_model: u64,
    accepted_by_model: u64,
}

impl Totals {
    fn and(self, stats: &Stats) -> Totals {
        let by_model = stats.draft_model.as_ref();
        Totals {
            drafted_tokens: self.drafted_tokens + stats.drafted_tokens,
            accepted_tokens: self.accepted_tokens + stats.accepted_tokens,
            drafted_by_model: self.drafted_by_model + by_model.map_or(0, |model| model.drafted_tokens),
            accepted_by_model: self.accepted_by_model + by_model.map_or(0, |model| model.accepted_tokens),
            prefix_queries: self.prefix_queries + stats.prefix_queries,
            prefix_hits: self.prefix_hits + stats.prefix_hits,
            prefix_restored: self.prefix_restored + stats.prefix_restored,
            generated_tokens: self.generated_tokens + stats.generated_tokens,
            preemptions: self.preemptions + stats.preemptions,
        }
    }
}

impl ModelMetrics {
    pub(crate) fn new() -> ModelMetrics {
        ModelMetrics {
            time_to_first_token: Histogram::new(FIRST_TOKEN),
            inter_token_latency: Histogram::new(BETWEEN_TOKENS),
            request_latency: Histogram::new(WHOLE),
            queue_time: Histogram::new(WHOLE),
            stop: AtomicU64::new(0),
            length: AtomicU64::new(0),
            abort: AtomicU64::new(0),
            loads: AtomicU64::new(0),
            load_failures: AtomicU64::new(0),
            load_us: AtomicU64::new(0),
            past: Mutex::new(Totals::default()),
        }
    }

    /// An answer ended.
    pub(crate) fn ended(&self, finish: Finish) {
        let counter = match finish {
            Finish::End | Finish::Stop(_) | Finish::Cut(_) => &self.stop,
            Finish::Length | Finish::Truncated => &self.length,
            Finish::Cancelled => &self.abort,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// The model was loaded in this many seconds.
    pub(crate) fn loaded(&self, seconds: f64) {
        let microseconds = Duration::try_from_secs_f64(seconds).unwrap_or_default().as_micros();
        self.load_us.store(u64::try_from(microseconds).unwrap_or(u64::MAX), Ordering::Relaxed);
        self.loads.fetch_add(1, Ordering::Relaxed);
    }

    /// It could not be.
    pub(crate) fn load_failed(&self) {
        self.load_failures.fetch_add(1, Ordering::Relaxed);
    }

    /// It is unloaded; its engine counted this.
    pub(crate) fn unloaded(&self, stats: &Stats) {
        let mut past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        *past = past.and(stats);
    }
}

/// What is counted whatever the model.
pub(crate) struct Metrics {
    /// Bounded by the number of codes.
    failures: Mutex<BTreeMap<Code, u64>>,
}

/// A model, as the page shows it.
struct Shown<'a> {
    labels: String,
    /// The same without `engine`, for what vLLM does not have.
    name: String,
    slot: &'a Slot,
    stats: Stats,
    totals: Totals,
}

impl<'a> Shown<'a> {
    fn of(slot: &'a Slot) -> Shown<'a> {
        let name = format!("model_name=\"{}\"", escaped(&slot.offer.card.name));
        let stats = slot.loaded().map(|served| served.engine.stats()).unwrap_or_default();
        let past = *slot.metrics.past.lock().unwrap_or_else(PoisonError::into_inner);
        Shown { labels: format!("engine=\"0\",{name}"), name, slot, totals: past.and(&stats), stats }
    }
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        Metrics { failures: Mutex::new(BTreeMap::new()) }
    }

    /// A request failed.
    pub(crate) fn failed(&self, code: Code) {
        // Short and rare; a message to a counting task would cost more.
        *self.failures.lock().unwrap_or_else(PoisonError::into_inner).entry(code).or_default() += 1;
    }

    /// The page, in Prometheus' text format. Before the first model is loaded it holds only the server's own counts.
    pub(crate) fn page(
        &self,
        slots: &[Slot],
        is_ready: bool,
        traces: Option<&Traces>,
        jobs: &[(String, Counts)],
    ) -> String {
        let mut page = Page::default();
        let shown: Vec<Shown<'_>> = slots.iter().map(Shown::of).collect();
        if is_ready {
            vllm(&mut page, &shown);
            drafts(&mut page, &shown);
            tiers(&mut page, &shown);
        }
        loads(&mut page, &shown);
        for (model, counts) in jobs {
            for state in JobState::ALL {
                let labels = format!("model_name=\"{}\",state=\"{}\"", escaped(model), state.name());
                page.sample("fornax_jobs", "gauge", "Durable jobs by state.", &labels, counts.of(state));
            }
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
}

/// What vLLM's dashboards read.
fn vllm(page: &mut Page, models: &[Shown<'_>]) {
    let mut gauge = |name, help, value: &dyn Fn(&Shown<'_>) -> f64| {
        for model in models {
            page.sample(name, "gauge", help, &model.labels, value(model));
        }
    };
    gauge("vllm:num_requests_running", "Requests being computed.", &|model| model.stats.running as f64);
    gauge("vllm:num_requests_waiting", "Requests waiting to be computed.", &|model| {
        (model.stats.requests_waiting + model.stats.preempted) as f64
    });
    gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", &|model| {
        let used: usize = model.stats.pages.iter().map(|group| group.referenced).sum();
        match pages_total(model) {
            0 => 0.0,
            total => used as f64 / total as f64,
        }
    });
    for model in models {
        let total = pages_total(model);
        let config = format!("{},block_size=\"{PAGE_TOKENS}\",num_gpu_blocks=\"{total}\"", model.labels);
        page.sample("vllm:cache_config_info", "gauge", "The KV cache.", &config, 1);
    }
    let mut count = |name, help, value: &dyn Fn(&Totals) -> u64| {
        for model in models {
            page.sample(name, "counter", help, &model.labels, value(&model.totals));
        }
    };
    count("vllm:prompt_tokens_total", "Prompt tokens of requests begun.", &|totals| totals.prefix_queries);
    count("vllm:generation_tokens_total", "Tokens chosen.", &|totals| totals.generated_tokens);
    count("vllm:num_preemptions_total", "Requests put back for others.", &|totals| totals.preemptions);
    count("vllm:prefix_cache_queries_total", "Prompt tokens looked up.", &|totals| totals.prefix_queries);
    count("vllm:prefix_cache_hits_total", "Prompt tokens found computed.", &|totals| totals.prefix_hits);
    count("vllm:spec_decode_num_draft_tokens_total", "Tokens guessed and computed ahead.", &|totals| {
        totals.drafted_tokens
    });
    count("vllm:spec_decode_num_accepted_tokens_total", "Of those, the ones that were right.", &|totals| {
        totals.accepted_tokens
    });
    for model in models {
        let own = &model.slot.metrics;
        for (reason, counter) in [("stop", &own.stop), ("length", &own.length), ("abort", &own.abort)] {
            let labels = format!("{},finished_reason=\"{reason}\"", model.labels);
            let count = counter.load(Ordering::Relaxed);
            let help = "Answers by how they ended.";
            page.sample("vllm:request_success_total", "counter", help, &labels, count);
        }
    }
    let mut histogram = |name, help, histogram: &dyn Fn(&ModelMetrics) -> &Histogram| {
        for model in models {
            page.histogram(name, help, &model.labels, histogram(&model.slot.metrics));
        }
    };
    histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", &|own| {
        &own.time_to_first_token
    });
    histogram("vllm:inter_token_latency_seconds", "Between tokens.", &|own| &own.inter_token_latency);
    histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", &|own| &own.request_latency);
    histogram("vllm:request_queue_time_seconds", "From arrival to being computed.", &|own| &own.queue_time);
}

fn pages_total(model: &Shown<'_>) -> usize {
    model.stats.pages.iter().map(|group| group.total).sum()
}

/// Where prompt tokens were found, and what keeps pages beyond the device's memory.
fn tiers(page: &mut Page, models: &[Shown<'_>]) {
    for model in models {
        let restored = model.totals.prefix_restored;
        let found = [("memory", model.totals.prefix_hits - restored), ("disk", restored)];
        for (tier, tokens) in found {
            let labels = format!("{},tier=\"{tier}\"", model.name);
            let help = "Prompt tokens found computed, by where.";
            page.sample("fornax_prefix_tokens_total", "counter", help, &labels, tokens);
        }
    }
    type Value = fn(&TierStats) -> u64;
    let samples: [(&str, &str, &str, Value); 9] = [
        ("fornax_tier_pages", "gauge", "Copies of pages that are kept.", |tier| tier.pages),
        ("fornax_tier_bytes", "gauge", "Bytes that they take.", |tier| tier.bytes),
        ("fornax_tier_bytes_max", "gauge", "Bytes that they may take.", |tier| tier.bytes_max),
        ("fornax_tier_off", "gauge", "1 where the tier failed and keeps nothing any more.", |tier| {
            u64::from(tier.off.is_some())
        }),
        ("fornax_tier_written_pages", "gauge", "Copies written since the load.", |tier| tier.pages_written),
        ("fornax_tier_read_pages", "gauge", "Copies read since the load.", |tier| tier.pages_read),
        ("fornax_tier_read_bytes", "gauge", "Bytes of them.", |tier| tier.bytes_read),
        (
            "fornax_tier_dropped_pages",
            "gauge",
            "Copies that came faster than they could be written.",
            |tier| tier.pages_dropped,
        ),
        ("fornax_tier_broken_pages", "gauge", "Copies that were damaged, and ignored.", |tier| {
            tier.pages_broken
        }),
    ];
    for (name, kind, help, value) in samples {
        for (model, tier) in models.iter().filter_map(|model| Some((model, model.stats.tier.as_ref()?))) {
            let labels = format!("{},tier=\"{}\"", model.name, tier.name);
            page.sample(name, kind, help, &labels, value(tier));
        }
    }
}

/// What is guessed, and by whom.
fn drafts(page: &mut Page, models: &[Shown<'_>]) {
    type Count = fn(&Totals) -> [u64; 2];
    let counts: [(&str, &str, Count); 2] = [
        (
            "fornax_drafted_tokens_total",
            "Tokens guessed and computed ahead, by who guessed them.",
            |totals| [totals.drafted_tokens - totals.drafted_by_model, totals.drafted_by_model],
        ),
        ("fornax_accepted_tokens_total", "Guessed tokens that were right, by who guessed them.", |totals| {
            [totals.accepted_tokens - totals.accepted_by_model, totals.accepted_by_model]
        }),
    ];
    for (name, help, count) in counts {
        for model in models {
            for (by, value) in ["repetition", "model"].into_iter().zip(count(&model.totals)) {
                let labels = format!("by=\"{by}\",{}", model.name);
                page.sample(name, "counter", help, &labels, value);
            }
        }
    }
}

/// Which models are loaded, how far others are, and what they take.
fn loads(page: &mut Page, models: &[Shown<'_>]) {
    for model in models {
        let standing = model.slot.look(State::standing);
        for state in Standing::ALL {
            let labels = format!("{},state=\"{}\"", model.name, state.name());
            let value = u8::from(state == standing);
            page.sample(
                "fornax_model_state",
                "gauge",
                "Where a model stands: 1 for its state.",
                &labels,
                value,
            );
        }
    }
    for model in models {
        let share = model.slot.look(|state| match state {
            State::Loading(progress) if progress.bytes_total > 0 => {
                progress.bytes as f64 / progress.bytes_total as f64
            }
            State::Loaded { .. } => 1.0,
            _ => 0.0,
        });
        page.sample(
            "fornax_model_load_ratio",
            "gauge",
            "Share of a model's bytes loaded, 0 to 1.",
            &model.name,
            share,
        );
    }
    for model in models {
        let count = model.slot.metrics.loads.load(Ordering::Relaxed);
        page.sample(
            "fornax_model_loads_total",
            "counter",
            "Times that a model was loaded.",
            &model.name,
            count,
        );
    }
    for model in models {
        let count = model.slot.metrics.load_failures.load(Ordering::Relaxed);
        let help = "Times that a model could not be loaded.";
        page.sample("fornax_model_load_failures_total", "counter", help, &model.name, count);
    }
    for (model, served) in models.iter().filter_map(|model| Some((model, model.slot.loaded()?))) {
        for device in &served.devices {
            for (purpose, bytes) in &device.bytes {
                let labels =
                    format!("device=\"{}\",{},purpose=\"{purpose}\"", escaped(&device.name), model.name);
                page.sample("fornax_device_bytes", "gauge", "Device memory by purpose.", &labels, bytes);
            }
        }
    }
    // Also of models that were unloaded since: that it was loaded is what this tells.
    for model in models.iter().filter(|model| model.slot.metrics.loads.load(Ordering::Relaxed) > 0) {
        let seconds = model.slot.metrics.load_us.load(Ordering::Relaxed) as f64 / 1e6;
        let help = "How long loading the model took, the last time.";
        page.sample("fornax_load_seconds", "gauge", help, &model.name, seconds);
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
