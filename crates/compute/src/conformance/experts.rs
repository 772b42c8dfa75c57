//! Experts: which are chosen with what weights, and the weighted sum of what they compute, against plain formulas in
//! f64.

use std::fmt;
use std::ops::Range;

use fornax_format::DType;

use crate::cpu::{Activations, expand_rows};
use crate::{
    Backend, Between, ExpertRoom, Experts, Glu, Groups, Need, Part, Pointwise, Purpose, Routing, Scores,
    Shares, WEIGHT_TYPES,
};

use super::bench::{Bench, Table, batch, step};
use super::random::{Random, Stored};
use super::{Case, Failure, Op, Suite, within};

/// Largest error against the specification of half activations: sums in another order may make one rounding on the way
/// fall to the other side, of a value that outweighs the others of its row.
const HALF_BOUND: f64 = 1e-6;
pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    if suite.backend.supports(Need::Experts).is_err() {
        return;
    }
    for shares in [Shares::OfAll, Shares::OfChosen] {
        for (experts, chosen) in [(1, 1), (4, 4), (8, 2), (60, 4), (128, 8), (300, 1)] {
            for (tokens, logits) in [
                (1, Logits::Usual),
                (33, Logits::Usual),
                (9, Logits::Ties),
                (5, Logits::Equal),
                (5, Logits::Large),
            ] {
                let routing = Routing::plain(experts, chosen, shares);
                let route = Route { routing, corrected: false, tokens, logits };
                suite.route(&route);
                suite.compare(Scaled { route });
            }
        }
    }
    routes(suite);
    let usual = Mixture {
        experts: 8,
        chosen: 2,
        tokens: 7,
        hidden: 96,
        ffn: 64,
        dtypes: [DType::F32; 3],
        bias: false,
        inputs: false,
        gated: true,
        choice: Choice::Spread,
    };
    for tokens in [1, 2, 7, 33] {
        for (experts, chosen) in [(1, 1), (4, 4), (8, 2), (40, 6)] {
            suite.mixture(Mixture { experts, chosen, tokens, ..usual });
        }
        suite.mixture(Mixture { tokens, choice: Choice::Crowded, ..usual });
        suite.mixture(Mixture { tokens, bias: true, ..usual });
        if suite.backend.supports(Need::WeighedInputs).is_ok() {
            suite.mixture(Mixture { tokens, inputs: true, ..usual });
        }
    }
    for dtype in [DType::F16, DType::BF16, DType::Q8_0, DType::MXFP8, DType::Q4_0, DType::Q5_1] {
        suite.mixture(Mixture { dtypes: [dtype; 3], tokens: 5, ..usual });
    }
    let wide = Mixture { hidden: 256, ffn: 256, ..usual };
    for dtypes in
        [[DType::Q4_K; 3], [DType::Q4_K, DType::Q6_K, DType::Q5_K], [DType::Q8_0, DType::BF16, DType::Q4_K]]
    {
        suite.mixture(Mixture { dtypes, bias: true, ..wide });
    }
    // Kernels may differ by how many rows an expert has, from one to a whole prompt.
    // Experts keep wide activations.
    for dtype in WEIGHT_TYPES.into_iter().filter(|dtype| *dtype != DType::FP8_A8) {
        let mixture = Mixture { experts: 2, chosen: 1, dtypes: [dtype; 3], tokens: 40, ..wide };
        suite.mixture(mixture);
        suite.regrouped(mixture, &[0..1, 1..8, 8..40]);
    }
    for dtype in [DType::BF16, DType::Q8_0, DType::Q4_K, DType::Q6_K, DType::MXFP4] {
        let mixture = Mixture { experts: 3, dtypes: [dtype; 3], bias: true, tokens: 100, ..wide };
        suite.mixture(Mixture { tokens: 5, ..mixture });
        suite.mixture(mixture);
        suite.mixture(Mixture { choice: Choice::Crowded, ..mixture });
        // What gates and counterparts are stored as differs.
        for tokens in [1, 40] {
            suite.mixture(Mixture { dtypes: [dtype, DType::F16, dtype], tokens, ..mixture });
        }
        suite.regrouped(mixture, &[0..1, 1..3, 3..20, 20..100]);
    }
    if suite.backend.supports(Need::PlainExperts).is_ok() {
        plain(suite, Mixture { gated: false, ..usual });
    }
    // Rows that fill no tile, and columns that fill no block.
    let plain = Mixture { dtypes: [DType::BF16; 3], bias: true, ..usual };
    for (hidden, ffn) in [(96, 40), (33, 24), (160, 17), (16, 16), (200, 336)] {
        for tokens in [1, 5, 64] {
            suite.mixture(Mixture { experts: 3, hidden, ffn, tokens, ..plain });
        }
    }
    for (experts, chosen) in [(60, 4), (128, 8)] {
        let mixture = Mixture { experts, chosen, hidden: 64, ffn: 32, tokens: 288, ..plain };
        suite.mixture(mixture);
        suite.regrouped(mixture, &[0..1, 1..3, 3..20, 20..84, 84..288]);
    }
    // Long rows, whose columns may be shared out.
    let dtypes = [DType::BF16, DType::BF16, DType::Q4_K];
    let long = Mixture { experts: 2, chosen: 1, hidden: 16, ffn: 8192, dtypes, tokens: 40, ..usual };
    suite.mixture(Mixture { tokens: 1, ..long });
    suite.mixture(long);
    suite.regrouped(long, &[0..1, 1..6, 6..40]);
    for mixture in [Mixture { tokens: 40, ..usual }, Mixture { tokens: 40, dtypes: [DType::Q4_K; 3], ..wide }]
    {
        suite.same_bits(format_args!("{mixture}: all tokens, and one by one"), |backend| {
            let mut alone = Table::new(mixture.hidden);
            for token in 0..mixture.tokens {
                alone.append(mixture.compute(backend, token..token + 1)?);
            }
            Ok((mixture.compute(backend, 0..mixture.tokens)?, alone))
        });
    }
}

/// Experts without gates.
fn plain<B: Backend>(suite: &mut Suite<'_, B>, usual: Mixture) {
    for tokens in [1, 2, 7, 33, 100] {
        suite.mixture(Mixture { tokens, ..usual });
        suite.mixture(Mixture { tokens, bias: true, experts: 40, chosen: 6, ..usual });
        suite.mixture(Mixture { tokens, choice: Choice::Crowded, ..usual });
    }
    for dtype in [DType::BF16, DType::Q8_0, DType::MXFP8, DType::Q4_K] {
        let mixture = Mixture { hidden: 256, ffn: 256, dtypes: [dtype; 3], experts: 3, tokens: 100, ..usual };
        suite.mixture(Mixture { tokens: 1, ..mixture });
        suite.mixture(Mixture { tokens: 5, bias: true, ..mixture });
        suite.mixture(mixture);
        suite.regrouped(mixture, &[0..1, 1..3, 3..20, 20..100]);
    }
    // Rows that fill no tile, and columns that fill no block.
    for (hidden, ffn) in [(96, 40), (33, 24), (160, 17)] {
        for tokens in [1, 5, 64] {
            let dtypes = [DType::BF16; 3];
            suite.mixture(Mixture { experts: 3, hidden, ffn, tokens, dtypes, bias: true, ..usual });
        }
    }
}

/// Scores other than a softmax, corrections, groups, and what weights are divided and multiplied by.
fn routes<B: Backend>(suite: &mut Suite<'_, B>) {
    let groups = |count, chosen, by_two| Some(Groups { count, chosen, by_two });
    for scores in [Scores::Softmax, Scores::Sigmoid, Scores::SqrtSoftplus] {
        for (experts, chosen, of_groups) in [
            (1, 1, None),
            (4, 4, None),
            (60, 4, None),
            (384, 8, None),
            (8, 2, groups(4, 1, true)),
            (8, 2, groups(4, 2, false)),
            (6, 6, groups(1, 1, true)),
            (256, 8, groups(8, 4, true)),
            (160, 6, groups(8, 3, false)),
            (120, 3, groups(40, 7, true)),
        ] {
            let usual = Routing {
                scores,
                groups: of_groups,
                added: 1e-20,
                ..Routing::plain(experts, chosen, Shares::OfChosen)
            };
            for (tokens, logits, corrected) in [
                (1, Logits::Usual, true),
                (33, Logits::Usual, true),
                (17, Logits::Usual, false),
                (9, Logits::Ties, false),
                (5, Logits::Equal, true),
            ] {
                suite.route(&Route { routing: usual, corrected, tokens, logits });
            }
            for routing in [
                Routing { shares: Shares::OfAll, scale: 2.5, ..usual },
                Routing { added: 0.25, ..usual },
                Routing { added: 0.0, least: 0.75, scale: 0.5, ..usual },
            ] {
                suite.route(&Route { routing, corrected: true, tokens: 17, logits: Logits::Usual });
            }
            let route = Route { routing: usual, corrected: true, tokens: 9, logits: Logits::Usual };
            suite.same_bits(format_args!("{route}: all tokens, and one by one"), |backend| {
                let (numbers, _) = route.formula();
                let mut alone = Table::new(chosen);
                for token in 0..route.tokens {
                    alone.append(route.compute(backend, token..token + 1, &numbers)?);
                }
                Ok((route.compute(backend, 0..route.tokens, &numbers)?, alone))
            });
        }
    }
}

impl<B: Backend> Suite<'_, B> {
    fn route(&mut self, route: &Route) {
        if !(self.chosen)(Op::Route, &route.to_string()) {
            return;
        }
        let (numbers, wanted) = route.formula();
        let compute = |backend: &B| route.compute(backend, 0..route.tokens, &numbers);
        self.against(Op::Route, route, &wanted, compute);
    }

    /// All tokens at once, and some after the others.
    fn regrouped(&mut self, mixture: Mixture, groups: &[Range<usize>]) {
        self.same_bits(format_args!("{mixture}: all tokens, and in groups"), |backend| {
            let mut table = Table::new(mixture.hidden);
            for group in groups {
                table.append(mixture.compute(backend, group.clone())?);
            }
            Ok((mixture.compute(backend, 0..mixture.tokens)?, table))
        });
    }

    fn mixture(&mut self, mixture: Mixture) {
        let words = mixture.to_string();
        if !(self.chosen)(Op::Experts, &words) {
            return;
        }
        let formula = self.reference.wanted(Op::Experts, &words, |_| Ok(mixture.formula()));
        let wanted = formula.expect("a formula does not fail");
        self.against(Op::Experts, mixture, &wanted, |backend| mixture.compute(backend, 0..mixture.tokens));
        if self.reference.activations() == Activations::Half {
            // What is rounded on the way is specified: nothing else is.
            let words = format!("{mixture}, as specified");
            let wanted =
                self.reference.wanted(Op::Experts, &words, |cpu| mixture.compute(cpu, 0..mixture.tokens));
            let outcome = wanted.and_then(|wanted| {
                let got = mixture.compute(self.backend, 0..mixture.tokens)?;
                within(HALF_BOUND, &got, &wanted)
            });
            self.conclude(Op::Experts, words, outcome);
        }
    }
}

/// What the logits of a token are.
#[derive(Clone, Copy, Debug)]
enum Logits {
    Usual,
    /// Among a few values, zeros of both signs among them.
    Ties,
    Equal,
    /// Beyond what exp takes.
    Large,
}

/// How close two experts of which one is chosen may be where scores decide, unless they are equal: the backend's own are
/// not exact.
const HAIR: f64 = 1e-5;

struct Route {
    routing: Routing,
    corrected: bool,
    tokens: usize,
    logits: Logits,
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Routing { experts, chosen, scores, groups, shares, added, least, scale } = self.routing;
        write!(f, "{chosen} of {experts} experts, {scores:?}, ")?;
        if let Some(Groups { count, chosen, by_two }) = groups {
            write!(f, "{chosen} of {count} groups by {}, ", if by_two { "two" } else { "one" })?;
        }
        write!(f, "{shares:?} + {added}, at least {least}, times {scale}, ")?;
        let corrected = if self.corrected { ", corrected" } else { "" };
        write!(f, "{} tokens, {:?} logits{corrected}", self.tokens, self.logits)
    }
}

/// The first of the best: a stable sort keeps the lower number before its equals. `None` where it is by a hair.
fn best(values: &[f64], count: usize, hair: f64) -> Option<Vec<usize>> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].partial_cmp(&values[a]).expect("no NaN here"));
    let gap = order.get(count).map_or(f64::INFINITY, |&next| values[order[count - 1]] - values[next]);
    order.truncate(count);
    order.sort_unstable();
    (gap == 0.0 || gap > hair).then_some(order)
}

impl Route {
    /// The logits, and the correction.
    fn inputs(&self) -> (Vec<f32>, Option<Vec<f32>>) {
        let mut random = Random::of(self);
        let experts = self.routing.experts;
        let correction =
            self.corrected.then(|| (0..experts).map(|_| 0.2 * random.value()).collect::<Vec<_>>());
        let mut all = Vec::new();
        while all.len() < self.tokens * experts {
            let logit = |_| match self.logits {
                Logits::Usual => 3.0 * random.value(),
                Logits::Ties => [-1.0, -0.0, 0.0, 0.0, 2.0][random.below(5)],
                Logits::Equal => 0.25,
                Logits::Large => 200.0 * random.value(),
            };
            let logits: Vec<f32> = (0..experts).map(logit).collect();
            if self.choice(&logits, correction.as_deref()).is_some() {
                all.extend(logits);
            }
        }
        (all, correction)
    }

    fn scores(&self, logits: &[f32]) -> Vec<f64> {
        let logits = logits.iter().copied().map(f64::from);
        match self.routing.scores {
            Scores::Softmax => {
                let largest = logits.clone().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = logits.clone().map(|logit| (logit - largest).exp()).sum();
                logits.map(|logit| (logit - largest).exp() / sum).collect()
            }
            Scores::Sigmoid => logits.map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
            Scores::SqrtSoftplus => logits.map(|logit| logit.exp().ln_1p().sqrt()).collect(),
        }
    }

    /// A token's experts; `None` where rounding may decide.
    fn choice(&self, logits: &[f32], correction: Option<&[f32]>) -> Option<Vec<usize>> {
        let Routing { chosen, groups, .. } = self.routing;
        if !self.routing.chooses_by_score(correction.is_some()) {
            let logits: Vec<f64> = logits.iter().copied().map(f64::from).collect();
            return best(&logits, chosen, 0.0);
        }
        let mut ranked = self.scores(logits);
        if let Some(correction) = correction {
            ranked.iter_mut().zip(correction).for_each(|(ranked, one)| *ranked += f64::from(*one));
        }
        if let Some(groups) = groups {
            let each = ranked.len() / groups.count;
            let good = |group: &[f64]| {
                let mut group = group.to_vec();
                group.sort_by(f64::total_cmp);
                let second = if groups.by_two { group[each - 2] } else { 0.0 };
                group[each - 1] + second
            };
            let taken = best(&ranked.chunks_exact(each).map(good).collect::<Vec<_>>(), groups.chosen, HAIR)?;
            for (expert, ranked) in ranked.iter_mut().enumerate() {
                if !taken.contains(&(expert / each)) {
                    *ranked = -1e9;
                }
            }
        }
        best(&ranked, chosen, HAIR)
    }

    /// The numbers and the weights of the chosen.
    fn formula(&self) -> (Vec<f32>, Table) {
        let Routing { experts, chosen, shares, added, least, scale, .. } = self.routing;
        let (logits, correction) = self.inputs();
        let (mut numbers, mut weights) = (Vec::new(), Table::new(chosen));
        for logits in logits.chunks_exact(experts) {
            let taken = self.choice(logits, correction.as_deref()).expect("others are not drawn");
            let scores = self.scores(logits);
            let sum = match shares {
                Shares::OfAll => 1.0,
                Shares::OfChosen => {
                    let sum: f64 = taken.iter().map(|&expert| scores[expert]).sum();
                    (sum + f64::from(added)).max(f64::from(least))
                }
            };
            let weight = |&expert: &usize| (scores[expert] / sum * f64::from(scale)) as f32;
            weights.values.extend(taken.iter().map(weight));
            numbers.extend(taken.iter().map(|&expert| expert as f32));
        }
        (numbers, weights)
    }

    /// The weights of some tokens, if the numbers are the wanted ones.
    fn compute<B: Backend>(
        &self,
        backend: &B,
        tokens: Range<usize>,
        numbers: &[f32],
    ) -> Result<Table, Failure> {
        let Routing { experts, chosen, .. } = self.routing;
        let (logits, correction) = self.inputs();
        let logits = &logits[tokens.start * experts..tokens.end * experts];
        let logits = Bench::filled(backend, Purpose::Logits, experts, logits)?;
        let correction = correction.map(|correction| backend.upload_values(&correction)).transpose()?;
        let mut out = Bench::poisoned(backend, Purpose::Residual, tokens.len(), 2 * chosen)?;
        step(backend, &batch(tokens.len(), 0), |step| {
            Ok(backend.route(step, &self.routing, &logits.buf, correction.as_ref(), &mut out.buf)?)
        })?;
        let mut weights = Table::new(chosen);
        for ((token, row), numbers) in tokens
            .clone()
            .zip(out.table(backend)?.rows())
            .zip(numbers[tokens.start * chosen..].chunks_exact(chosen))
        {
            if row[..chosen] != *numbers {
                let got = &row[..chosen];
                return Err(Failure(format!("token {token} has experts {got:?}, wanted {numbers:?}")));
            }
            weights.values.extend(&row[chosen..]);
        }
        Ok(weights)
    }
}

/// Each expert's weight times a number of its own.
struct Scaled {
    route: Route,
}

impl fmt::Display for Scaled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, scaled", self.route)
    }
}

impl Case for Scaled {
    fn op(&self) -> Op {
        Op::Route
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Experts, Need::ExpertScales]
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let Route { routing, tokens, .. } = self.route;
        let (numbers, weights) = self.route.formula();
        let rows = numbers.chunks_exact(routing.chosen).zip(weights.rows());
        let chosen: Vec<f32> = rows.flat_map(|(numbers, weights)| [numbers, weights].concat()).collect();
        let mut chosen = Bench::filled(backend, Purpose::Residual, 2 * routing.chosen, &chosen)?;
        let scales = backend.upload_values(&Random::of(self).values(routing.experts))?;
        step(backend, &batch(tokens, 0), |step| Ok(backend.scale_chosen(step, &scales, &mut chosen.buf)?))?;
        chosen.table(backend)
    }
}

/// Whom tokens choose.
#[derive(Clone, Copy, Debug)]
enum Choice {
    /// Anybody; some experts nobody.
    Spread,
    /// All tokens the last ones.
    Crowded,
}

/// The experts of a layer; the types are those of gate, up and down. Where there are no gates, what is called one here is
/// all of the first product.
#[derive(Clone, Copy)]
struct Mixture {
    experts: usize,
    chosen: usize,
    tokens: usize,
    hidden: usize,
    ffn: usize,
    dtypes: [DType; 3],
    bias: bool,
    /// Whether weights multiply what experts read.
    inputs: bool,
    gated: bool,
    choice: Choice,
}

impl fmt::Display for Mixture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mixture { experts, chosen, tokens, hidden, ffn, dtypes, bias, inputs, gated, choice } = self;
        let [gate, up, down] = dtypes;
        write!(f, "{chosen} of {experts} experts of {hidden} and {ffn}, {gate} {up} {down}, ")?;
        write!(f, "{tokens} tokens, {choice:?}{}", if *bias { ", biases" } else { "" })?;
        write!(f, "{}", if *inputs { ", inputs weighed" } else { "" })?;
        write!(f, "{}", if *gated { "" } else { ", without gates" })
    }
}

/// What a mixture is computed from.
struct Inputs {
    /// By expert: gate, up and down.
    stored: Vec<[Stored; 3]>,
    /// Where there are biases the rows of a gate are in another order, too.
    order: Option<Vec<u32>>,
    gate_up_bias: Vec<f32>,
    down_bias: Vec<f32>,
    x: Vec<f32>,
    /// The experts of each token.
    taken: Vec<u32>,
    /// A row for each token: their numbers, then their weights.
    chosen: Vec<f32>,
    residual: Vec<f32>,
    gated: bool,
}

impl Inputs {
    fn gate_up(&self) -> Result<Vec<Part<'_>>, Failure> {
        let mut parts = Vec::new();
        for [gate, up, _] in &self.stored {
            parts.push(Part { rows: self.order.clone(), ..gate.part()? });
            if self.gated {
                parts.push(up.part()?);
            }
        }
        Ok(parts)
    }

    fn down(&self) -> Result<Vec<Part<'_>>, Failure> {
        self.stored.iter().map(|[_, _, down]| down.part()).collect()
    }
}

impl Mixture {
    fn inputs(&self) -> Inputs {
        let mut random = Random::of(self);
        let Mixture { experts, chosen, tokens, hidden, ffn, dtypes, bias, gated, choice, .. } = *self;
        let stored = (0..experts).map(|_| {
            let shapes = [(ffn, hidden), (ffn, hidden), (hidden, ffn)];
            [0, 1, 2].map(|at| Stored::matrix(&mut random, dtypes[at], shapes[at].0, shapes[at].1))
        });
        let stored = stored.collect();
        let (mut all, mut rows) = (Vec::new(), Vec::new());
        for _ in 0..tokens {
            let mut taken = match choice {
                Choice::Spread => random.order(experts)[..chosen].to_vec(),
                Choice::Crowded => ((experts - chosen) as u32..experts as u32).collect(),
            };
            taken.sort_unstable();
            rows.extend(taken.iter().map(|expert| *expert as f32));
            rows.extend(random.values(chosen));
            all.extend(taken);
        }
        Inputs {
            stored,
            order: bias.then(|| random.order(ffn)),
            gate_up_bias: random.values(experts * self.between().columns(ffn)),
            down_bias: random.values(experts * hidden),
            x: random.values(tokens * hidden).iter().map(|x| 0.1 * x).collect(),
            taken: all,
            chosen: rows,
            residual: random.values(tokens * hidden),
            gated,
        }
    }

    fn between(&self) -> Between {
        if self.gated { Between::Gates(Glu::Silu) } else { Between::Function(Pointwise::ReluSquared) }
    }

    /// One expert of one token after the other.
    fn formula(&self) -> Table {
        let Mixture { chosen, hidden, ffn, bias, gated, .. } = *self;
        let (inputs, columns) = (self.inputs(), self.between().columns(ffn));
        let expanded = |part: &Part<'_>| -> Vec<Vec<f64>> {
            let mut rows = Vec::new();
            let done = expand_rows(part, |_, row| {
                rows.push(row.iter().copied().map(f64::from).collect());
                Ok(())
            });
            done.expect("the suite's types are known");
            rows
        };
        let made = "the suite makes whole tensors";
        let gate_up: Vec<_> = inputs.gate_up().expect(made).iter().map(expanded).collect();
        let down: Vec<_> = inputs.down().expect(made).iter().map(expanded).collect();
        let product = |rows: &[Vec<f64>], x: &[f64], bias: Option<&[f32]>| -> Vec<f64> {
            let dot = |row: &Vec<f64>| row.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
            let bias = |row: usize| bias.map_or(0.0, |bias| f64::from(bias[row]));
            rows.iter().enumerate().map(|(row, weights)| dot(weights) + bias(row)).collect()
        };
        let mut out = Table::new(hidden);
        for token in 0..self.tokens {
            let x: Vec<f64> = inputs.x[token * hidden..][..hidden].iter().copied().map(f64::from).collect();
            let taken = &inputs.taken[token * chosen..][..chosen];
            let weights = &inputs.chosen[token * 2 * chosen + chosen..][..chosen];
            let mut sums: Vec<f64> =
                inputs.residual[token * hidden..][..hidden].iter().copied().map(f64::from).collect();
            for (expert, weight) in taken.iter().zip(weights) {
                let expert = *expert as usize;
                let weight = f64::from(*weight);
                let (before, weight) = if self.inputs { (weight, 1.0) } else { (1.0, weight) };
                let x: Vec<f64> = x.iter().map(|x| x * before).collect();
                let biases = bias.then(|| inputs.gate_up_bias[expert * columns..][..columns].split_at(ffn));
                let gated: Vec<f64> = if gated {
                    let gate = product(&gate_up[2 * expert], &x, biases.map(|biases| biases.0));
                    let up = product(&gate_up[2 * expert + 1], &x, biases.map(|biases| biases.1));
                    gate.iter().zip(&up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect()
                } else {
                    let inner = product(&gate_up[expert], &x, biases.map(|biases| biases.0));
                    inner.iter().map(|value| value.max(0.0).powi(2)).collect()
                };
                let bias = bias.then(|| &inputs.down_bias[expert * hidden..][..hidden]);
                let said = product(&down[expert], &gated, bias);
                sums.iter_mut().zip(said).for_each(|(sum, value)| *sum += weight * value);
            }
            out.values.extend(sums.iter().map(|sum| *sum as f32));
        }
        out
    }

    /// Some of the tokens.
    fn compute<B: Backend>(&self, backend: &B, tokens: Range<usize>) -> Result<Table, Failure> {
        let Mixture { experts, chosen, hidden, ffn, bias, .. } = *self;
        let inputs = self.inputs();
        let gate_up = backend.upload_experts(&inputs.gate_up()?, experts)?;
        let down = backend.upload_experts(&inputs.down()?, experts)?;
        let gate_up_bias = backend.upload_values(&inputs.gate_up_bias)?;
        let down_bias = backend.upload_values(&inputs.down_bias)?;
        let weights = Experts {
            count: experts,
            gate_up: &gate_up,
            gate_up_bias: bias.then_some(&gate_up_bias),
            down: &down,
            down_bias: bias.then_some(&down_bias),
            between: self.between(),
            weighs_inputs: self.inputs,
        };
        let some = |values: &[f32], columns: usize, purpose| {
            Bench::filled(backend, purpose, columns, &values[tokens.start * columns..tokens.end * columns])
        };
        let x = some(&inputs.x, hidden, Purpose::Activations)?;
        let chosen_rows = some(&inputs.chosen, 2 * chosen, Purpose::Residual)?;
        let mut residual = some(&inputs.residual, hidden, Purpose::Residual)?;
        let room = |columns| Bench::poisoned(backend, Purpose::Activations, tokens.len() * chosen, columns);
        let (rows, gate_up_room, gated) = (room(hidden)?, room(2 * ffn)?, room(ffn)?);
        let mut room = ExpertRoom { rows: rows.buf, gate_up: gate_up_room.buf, gated: gated.buf };
        step(backend, &batch(tokens.len(), 0), |step| {
            Ok(backend.experts(step, &weights, &chosen_rows.buf, &x.buf, &mut room, &mut residual.buf)?)
        })?;
        residual.table(backend)
    }
}
