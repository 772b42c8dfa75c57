//! What a model will take, before anything of it is loaded. docs/memory-plan.md explains the table.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;

use clap::Args;
use fornax::machine;
use fornax::{Change, Code, Memory, Planned};
use fornax_compute::{Purpose, Usage};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::args::{JsonArg, ModelArg, byte_size};
use super::device::{CapacityArgs, DraftArg};
use super::failure::Failure;
use super::output::binary;
use super::{card, device, locate, output};

/// Say what a model will take in memory, and whether it fits
///
/// From headers and flags alone: nothing is loaded, and of a model of the hub only headers are fetched. --device also
/// takes the name of a card that is not here (h100, rtx4090, ...). `run` and `generate` make the same plan first and
/// refuse what does not fit. Where it does not fit, the plan says what would: a shorter context, fewer requests, or
/// other types of the same matrices. Exit code 0 fits, 3 does not fit, 4 cannot be computed by this build.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax plan ./model.gguf
  fornax plan ./model.gguf --context 8192 --parallel 4
  fornax plan ./Mixtral-8x7B --memory-limit 24GiB --json
  fornax plan qwen3-8b --device h100               a model and a card that are not here
  fornax plan qwen3-8b --gpu-memory 24GiB")]
pub(crate) struct Plan {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) output: JsonArg,
    #[command(flatten)]
    pub(crate) capacity: CapacityArgs,
    #[command(flatten)]
    pub(crate) draft: DraftArg,
    /// Plan for a GPU with so much free memory, whether or not one is here: bytes, or with MiB, GiB
    #[arg(long, value_name = "BYTES", value_parser = byte_size, help_heading = "Model")]
    pub(crate) gpu_memory: Option<u64>,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
pub(crate) struct Report<'a> {
    model: &'a Path,
    parameters: u64,
    fits: bool,
    /// Why this build cannot compute the model, if it cannot.
    unsupported: Option<&'a str>,
    context: usize,
    context_trained: usize,
    parallel: usize,
    kv_dtype: String,
    kv_bytes_per_token: u64,
    pool_tokens: usize,
    /// What it would hold if every request had its whole context.
    pool_tokens_wanted: usize,
    /// Of models whose layers keep states of sequences.
    #[serde(skip_serializing_if = "Option::is_none")]
    states: Option<Value>,
    weights: Vec<Value>,
    devices: Vec<Device>,
    /// The model that drafts; the runtime's bytes contain these.
    #[serde(skip_serializing_if = "Option::is_none")]
    draft: Option<Value>,
    /// What would fit instead.
    remedies: Vec<Value>,
}

#[derive(Debug, Serialize)]
struct Device {
    device: &'static str,
    bytes: Map<String, Value>,
    total_bytes: u64,
    limit_bytes: u64,
    /// Weights in the host's memory beside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    host_bytes: Option<u64>,
}

pub(crate) fn plan(args: &Plan) -> anyhow::Result<()> {
    let outline = locate::outline(args.model.name())?;
    let planned = planned(args, &outline.path)?;
    let shown = Path::new(&outline.name);
    if args.output.json {
        output::json(&report(shown, &planned))?;
    } else {
        io::stdout().lock().write_all(table(shown, &planned)?.as_bytes())?;
        let limit = args.capacity.device.memory_limit.filter(|_| planned.device == "cpu");
        if let Some((limit, total)) =
            limit.zip(machine::memory_total()).filter(|(limit, total)| limit > total)
        {
            writeln!(
                io::stdout(),
                "note: --memory-limit is {}, and this machine has {}",
                binary(limit),
                binary(total)
            )?;
        }
    }
    if !planned.plan.fits() {
        return Err(planned.refusal().into());
    }
    match planned.plan.unsupported {
        Some(reason) => Err(Failure::new(Code::ModelUnsupported, reason).into()),
        None => Ok(()),
    }
}

/// The plan on the device that was asked for, which need not be here.
fn planned(args: &Plan, path: &Path) -> anyhow::Result<Planned> {
    let mut device = args.capacity.device.clone();
    let card = card::free_bytes(&device.device);
    if card.is_some() && args.gpu_memory.is_some() {
        let message =
            format!("--device {} says how much memory there is; leave out --gpu-memory", device.device);
        return Err(Failure::usage(message).into());
    }
    let assumed = args.gpu_memory.or(card);
    if assumed.is_some() && (card.is_some() || device.device == "auto") {
        device.device = "cuda:0".to_owned();
    }
    if args.gpu_memory.is_some() && device.device == "cpu" {
        return Err(Failure::usage("--gpu-memory is for a GPU; for the CPU there is --memory-limit").into());
    }
    let mut options =
        device::options(path, &device).map_err(|error| match error.downcast_ref::<Failure>() {
            Some(failure) if failure.code() == Code::InvalidInput && !device.device.contains(':') => {
                Failure::usage(format!("{failure}, or for a card that is not here one of {}", card::names()))
                    .into()
            }
            _ => error,
        })?;
    if let Some(bytes) = assumed {
        options = options.assume_free(bytes);
    }
    Ok(args.draft.apply(options)?.parallel(args.capacity.parallel).plan()?)
}

/// Bytes by the names of their purposes.
pub(crate) fn by_purpose(usage: &Usage) -> Map<String, Value> {
    Purpose::ALL.into_iter().map(|purpose| (purpose.to_string(), usage.bytes(purpose).into())).collect()
}

/// Plan and allocator side by side, for `--json`.
pub(crate) fn comparison(memory: &Memory) -> Value {
    json!({
        "planned": by_purpose(&memory.planned),
        "allocated": by_purpose(&memory.allocated),
        "difference_bytes": i128::from(memory.allocated.total()) - i128::from(memory.planned.total()),
    })
}

/// The same for people, in one line.
pub(crate) fn comparison_line(memory: &Memory) -> String {
    let parts = Purpose::ALL.into_iter().map(|purpose| {
        let (planned, allocated) = (memory.planned.bytes(purpose), memory.allocated.bytes(purpose));
        if planned == allocated {
            format!("{purpose} {}", binary(allocated))
        } else {
            format!("{purpose} {} where {} was planned", binary(allocated), binary(planned))
        }
    });
    let parts: Vec<String> = parts.collect();
    let same = if memory.planned == memory.allocated { "as planned" } else { "not as planned" };
    format!("memory: {} allocated, {same}: {}", binary(memory.allocated.total()), parts.join(", "))
}

/// The plan as `--json` prints it.
pub(crate) fn report<'a>(path: &'a Path, planned: &'a Planned) -> Report<'a> {
    let plan = &planned.plan;
    let mut bytes = by_purpose(&plan.usage());
    bytes.insert("runtime".to_owned(), plan.runtime_bytes().into());
    bytes.insert("margin".to_owned(), plan.margin_bytes().into());
    Report {
        model: path,
        parameters: plan.stored.iter().map(|stored| stored.values).sum(),
        fits: plan.fits(),
        unsupported: plan.unsupported.as_deref(),
        context: plan.context,
        context_trained: plan.context_trained,
        parallel: plan.parallel,
        kv_dtype: plan.kv.dtype.to_string(),
        kv_bytes_per_token: plan.kv_token_bytes,
        pool_tokens: plan.pool_tokens(),
        pool_tokens_wanted: plan.pool_tokens_wanted(),
        states: plan.states().map(|(count, bytes, every)| {
            json!({"count": count, "bytes": bytes, "tokens_between_checkpoints": every})
        }),
        weights: plan
            .stored
            .iter()
            .map(|stored| {
                json!({"dtype": stored.dtype.name(), "computed": stored.computed.name(),
                    "tensors": stored.tensors, "values": stored.values, "bytes": stored.bytes})
            })
            .collect(),
        devices: vec![Device {
            device: planned.device,
            bytes,
            total_bytes: plan.total_bytes(),
            limit_bytes: plan.limit_bytes(),
            host_bytes: Some(plan.host_bytes()).filter(|bytes| *bytes > 0),
        }],
        draft: planned.draft.as_ref().map(|draft| {
            json!({"context": draft.context, "kv_bytes_per_token": draft.kv_token_bytes,
                "pool_tokens": draft.pool_tokens(), "bytes": by_purpose(&draft.usage())})
        }),
        remedies: planned
            .remedies
            .iter()
            .map(|remedy| {
                let total = remedy.plan.total_bytes();
                match remedy.change {
                    Change::Context(context) => json!({"context": context, "total_bytes": total}),
                    Change::Parallel(parallel) => json!({"parallel": parallel, "total_bytes": total}),
                    Change::Quant(dtype) => json!({"quant": dtype.name(), "total_bytes": total}),
                }
            })
            .collect(),
    }
}

fn table(path: &Path, planned: &Planned) -> Result<String, std::fmt::Error> {
    let plan = &planned.plan;
    let mut out = String::new();
    let parameters: u64 = plan.stored.iter().map(|stored| stored.values).sum();
    writeln!(out, "{}", path.display())?;
    let (scale, unit) = if parameters < 1_000_000_000 { (1e6, "million") } else { (1e9, "billion") };
    writeln!(out, "{:.2} {unit} parameters on {}", parameters as f64 / scale, planned.device)?;
    let token = binary(plan.kv_token_bytes);
    let (context, parallel, dtype) = (plan.context, plan.parallel, plan.kv.dtype);
    writeln!(out, "{parallel} x {context} tokens of context; keys and values in {dtype}, {token} a token")?;
    if let Some((count, bytes, every)) = plan.states() {
        let state = binary(bytes);
        writeln!(
            out,
            "{count} states of {state}: one for each request, and checkpoints every {every} tokens"
        )?;
    }
    if plan.pool_tokens() < plan.pool_tokens_wanted() {
        writeln!(
            out,
            "the pool holds {} of these {} tokens, which is what the limit leaves",
            plan.pool_tokens(),
            plan.pool_tokens_wanted()
        )?;
    }
    writeln!(out)?;
    let mut line = |name: &str, bytes: u64, note: &str| {
        let row = format!("{name:<12} {:>12}  {note}", binary(bytes));
        writeln!(out, "{}", row.trim_end())
    };
    for purpose in Purpose::ALL {
        let note = match purpose {
            Purpose::Weights => stored(planned),
            Purpose::Kv => format!("{} tokens", plan.pool_tokens()),
            Purpose::Residual | Purpose::Activations => format!("steps of {} tokens", plan.step.tokens_max),
            Purpose::Logits => format!("{} rows", plan.step.wanted_max),
            Purpose::Workspace => String::new(),
        };
        line(&purpose.to_string(), plan.usage().bytes(purpose), &note)?;
    }
    let drafting = planned.draft.as_ref().map_or(0, |draft| draft.usage().total());
    let runtime = plan.runtime_bytes().saturating_sub(drafting);
    line("runtime", runtime, "code, stacks, tokenizer, page tables")?;
    if let Some(draft) = &planned.draft {
        let (weights, kv) = (draft.usage().bytes(Purpose::Weights), draft.usage().bytes(Purpose::Kv));
        let (weights, kv, tokens) = (binary(weights), binary(kv), draft.pool_tokens());
        line(
            "draft",
            drafting,
            &format!("a model that drafts: weights {weights}, {kv} for {tokens} tokens"),
        )?;
    }
    line("margin", plan.margin_bytes(), "")?;
    line("total", plan.total_bytes(), "")?;
    line("may be used", plan.limit_bytes(), "")?;
    if plan.host_bytes() > 0 {
        line("host", plan.host_bytes(), "weights in the host's memory, beside the device's")?;
    }
    writeln!(out)?;
    match (plan.fits(), &plan.unsupported) {
        (true, None) => writeln!(out, "fits")?,
        (true, Some(_)) => writeln!(out, "would fit, but this build cannot compute it")?,
        (false, _) => writeln!(out, "does not fit")?,
    }
    for remedy in &planned.remedies {
        let total = binary(remedy.plan.total_bytes());
        match remedy.change {
            Change::Context(context) => writeln!(out, "with --context {context} it would: {total}")?,
            Change::Parallel(parallel) => writeln!(out, "with --parallel {parallel} it would: {total}")?,
            Change::Quant(dtype) => writeln!(out, "with its matrices in {dtype} it would: {total}")?,
        }
    }
    Ok(out)
}

/// The weights' types as they are stored.
fn stored(planned: &Planned) -> String {
    let stored = planned.plan.stored.iter();
    let types: Vec<String> = stored
        .map(|stored| match stored.computed {
            same if same == stored.dtype => format!("{same} {}", binary(stored.bytes)),
            other => format!("{} {} (computed in {other})", stored.dtype, binary(stored.bytes)),
        })
        .collect();
    format!("stored as {}", types.join(", "))
}
