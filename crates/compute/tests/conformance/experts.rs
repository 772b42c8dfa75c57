//! Whole feed-forwards of experts against outputs that `make_experts.py` had computed by transformers.

use fornax_compute::cpu::{Activations, Cpu, Simd};
use fornax_compute::{
    Backend, Batch, Between, ExpertRoom, Experts, Glu, Groups, Memory, Part, Pointwise, Purpose, Routing,
    Row, Rows, Scores, Shares, Token,
};
use fornax_format::{DType, View};
use serde::Deserialize;

use crate::cpu;

#[derive(Deserialize)]
struct Case {
    chosen: usize,
    shares: String,
    hidden: usize,
    ffn: usize,
    experts: usize,
    x: Vec<f32>,
    out: Vec<f64>,
    router: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
    shared: Option<Shared>,
    scores: Option<String>,
    correction: Option<Vec<f32>>,
    groups: Option<usize>,
    groups_chosen: Option<usize>,
    by_two: Option<bool>,
    #[serde(default)]
    added: f32,
    #[serde(default)]
    least: f32,
    scale: Option<f32>,
    /// Squared ReLU between the products, and no gates.
    #[serde(default)]
    plain: bool,
}

impl Case {
    fn routing(&self) -> Routing {
        let shares = if self.shares == "all" { Shares::OfAll } else { Shares::OfChosen };
        let scores = if self.scores.is_some() { Scores::Sigmoid } else { Scores::Softmax };
        let groups = self.groups.map(|count| Groups {
            count,
            chosen: self.groups_chosen.unwrap(),
            by_two: self.by_two.unwrap(),
        });
        let Case { added, least, .. } = *self;
        let scale = self.scale.unwrap_or(1.0);
        let plain = Routing::plain(self.experts, self.chosen, shares);
        Routing { scores, groups, added, least, scale, ..plain }
    }
}

#[derive(Deserialize)]
struct Shared {
    ffn: usize,
    /// Without it everything counts in full.
    gate: Option<Vec<f32>>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
}

type Weight = <Cpu as Memory>::Weight;

/// `count` matrices of `columns` columns.
fn matrices(cpu: &Cpu, count: usize, columns: usize, values: &[f32]) -> Weight {
    let rows = values.len() / columns / count;
    let bytes: Vec<Vec<u8>> = values
        .chunks_exact(rows * columns)
        .map(|values| values.iter().flat_map(|value| value.to_le_bytes()).collect())
        .collect();
    let part = |bytes| Part::from(View::new("golden", DType::F32, vec![rows, columns], bytes).unwrap());
    let parts: Vec<_> = bytes.iter().map(|bytes| part(bytes)).collect();
    cpu.upload_experts(&parts, count).unwrap()
}

fn feed_forward(cpu: &Cpu, case: &Case) -> Vec<f32> {
    let Case { chosen: each, hidden, ffn, experts, .. } = *case;
    let tokens = case.x.len() / hidden;
    let buf = |rows, columns| cpu.alloc(Purpose::Residual, rows, columns).unwrap();
    let matrix = |columns, values: &[f32]| matrices(cpu, 1, columns, values);
    let mut x = buf(tokens, hidden);
    cpu.write(&mut x, 0, &case.x).unwrap();
    let mut residual = buf(tokens, hidden);
    cpu.write(&mut residual, 0, &vec![0.0; tokens * hidden]).unwrap();

    let mut batch = Batch::default();
    let len = u32::try_from(tokens).unwrap();
    batch.push(Row { slot: 0, start: 0, len, pages: vec![], wanted: 0 }, vec![Token::Known(0); tokens]);
    let step = cpu.begin(&batch).unwrap();
    let (mut logits, mut chosen) = (buf(tokens, experts), buf(tokens, 2 * each));
    cpu.matmul(&step, Rows::Tokens, &matrix(hidden, &case.router), &x, &mut logits).unwrap();
    let correction = case.correction.as_ref().map(|correction| cpu.upload_values(correction).unwrap());
    cpu.route(&step, &case.routing(), &logits, correction.as_ref(), &mut chosen).unwrap();
    let (gate_up, down) =
        (matrices(cpu, experts, hidden, &case.gate_up), matrices(cpu, experts, ffn, &case.down));
    let weights = Experts {
        count: experts,
        gate_up: &gate_up,
        gate_up_bias: None,
        down: &down,
        down_bias: None,
        between: match case.plain {
            true => Between::Function(Pointwise::ReluSquared),
            false => Between::Gates(Glu::Silu),
        },
        weighs_inputs: false,
    };
    let pairs = tokens * each;
    let mut room =
        ExpertRoom { rows: buf(pairs, hidden), gate_up: buf(pairs, 2 * ffn), gated: buf(pairs, ffn) };
    cpu.experts(&step, &weights, &chosen, &x, &mut room, &mut residual).unwrap();

    if let Some(shared) = &case.shared {
        let columns = weights.between.columns(shared.ffn);
        let (mut gate, mut gate_up) = (buf(tokens, 1), buf(tokens, columns));
        let (mut gated, mut out) = (buf(tokens, shared.ffn), buf(tokens, hidden));
        cpu.matmul(&step, Rows::Tokens, &matrix(hidden, &shared.gate_up), &x, &mut gate_up).unwrap();
        let inner = match weights.between {
            Between::Gates(kind) => {
                cpu.glu(&step, kind, &gate_up, &mut gated).unwrap();
                &gated
            }
            Between::Function(function) => {
                cpu.pointwise(&step, Rows::Tokens, function, &mut gate_up).unwrap();
                &gate_up
            }
        };
        cpu.matmul(&step, Rows::Tokens, &matrix(shared.ffn, &shared.down), inner, &mut out).unwrap();
        match &shared.gate {
            None => cpu.add(&step, Rows::Tokens, &out, &mut residual).unwrap(),
            Some(weight) => {
                cpu.matmul(&step, Rows::Tokens, &matrix(hidden, weight), &x, &mut gate).unwrap();
                cpu.add_gated(&step, &gate, &out, &mut residual).unwrap();
            }
        }
    }
    cpu.finish(step).unwrap();
    cpu.read(&residual, 0, tokens).unwrap()
}

#[test]
fn a_feed_forward_of_experts_is_that_of_transformers() {
    let cases: Vec<Case> = serde_json::from_str(include_str!("experts.json")).unwrap();
    assert_eq!(cases.len(), 8);
    for case in &cases {
        for simd in Simd::present() {
            for activations in [Activations::Float, Activations::Integer] {
                let got = feed_forward(&cpu(simd, activations, 2), case);
                assert_eq!(got.len(), case.out.len());
                let error: f64 =
                    got.iter().zip(&case.out).map(|(got, wanted)| (f64::from(*got) - wanted).powi(2)).sum();
                let size: f64 = case.out.iter().map(|wanted| wanted.powi(2)).sum();
                assert!(size > 1.0 && error <= 1e-12 * size, "{} {simd:?}: {:e}", case.shares, error / size);
            }
        }
    }
}
