//! The flags of `fornax bench`.

use clap::{Args, ValueEnum};

use crate::cli::args::{JsonArg, per_second, positive, several};
use crate::cli::device::DeviceArgs;

/// Measure how fast a model runs here
///
/// Through the engine, as requests run: prefill of prompts of several lengths; decode of several streams together, and
/// of one behind 8000 tokens where the context has room (on a GPU it is made to); a mixed load of requests that arrive
/// at random times at a given rate, with the times to the first token and between tokens; the same prompt of 1024
/// tokens twice (the second time it is found in the cache); and loading. Beside them: the bytes and operations that
/// they take, and their shares of what this machine does at most, measured in the same run: memory that is read (a
/// GPU's: copied), and a GPU's tensor cores, multiplying f16 without loading anything. On a GPU also the time of a
/// step, and what the engine's own thread takes for one: it is hidden where it is less.
///
/// With --http a server is started beside it, on this machine and in this process, and decode and mixed load are
/// measured again by clients that stream over its sockets; with --http=URL such a server, one without keys, is measured
/// instead.
///
/// --json prints {model, device, threads, threads_for_few (of those, the ones that compute single tokens), activations,
/// kv_dtype, memory_bytes_per_second, upload_bytes_per_second and matrix_operations_per_second (of a GPU), load, prefill,
/// decode, mixed, prefix, http, skipped}.
///
/// With several numbers of --threads, such as 2,8,16, the model is opened and measured with each, and the best of them is
/// told for every figure; --json prints {runs, best}.
///
/// With --make-random it writes a model of random weights in the shape of a real one instead, without a tokenizer, and
/// prints its path.
///
/// With --shapes it makes such models itself, one after the other in the types of --types, measures them and removes
/// them. The largest of the usual shapes takes 15 GB. --json prints the same with {models} in place of one model's
/// figures.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  fornax bench
  fornax bench --shapes --device cuda:0
  fornax bench --shapes=qwen2.5-7b --types bf16,q4_k_m --only decode --streams 1,64 --device cuda:0
  fornax bench ./model.gguf --threads 4 --json
  fornax bench ./model.gguf --threads 2,8,16
  fornax bench ./model.gguf --http
  fornax bench --http=http://127.0.0.1:8080 --streams 1,16 --rate 2
  fornax bench --make-random qwen2.5-0.5b --quant q8_0
  fornax bench ./random.gguf --make-random tiny --quant f16

Shapes: tiny, smollm2-135m, qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-7b, llama3-70b, qwen3-30b-a3b; of hybrids tiny-hybrid, \
tiny-hybrid-moe, qwen3.5-4b, qwen3.6-27b, qwen3.6-35b-a3b. Types: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, \
q4_k, q5_k, q6_k, q4_k_m; rows that do not fill a block of the type fall back to another, as in llama.cpp.")]
pub(crate) struct Bench {
    /// Path, catalog name or hub reference of the model [default: smollm2]; with --make-random the file to write
    /// [default: SHAPE-QUANT.gguf in this folder]
    pub(crate) model: Option<String>,
    /// Measure these and nothing else
    #[arg(long, value_name = "PART,...", value_delimiter = ',', value_enum)]
    pub(crate) only: Vec<Part>,
    /// Streams that are decoded together [default: 1,4,16; on a GPU 1,8,32,64,128,256]
    #[arg(long, value_name = "N,...", value_delimiter = ',', allow_negative_numbers = true, value_parser = positive)]
    pub(crate) streams: Vec<usize>,
    /// Tokens before each of them; the mixed load has half to 15 halves of it [default: 16; on a GPU 128]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) prompt: Option<usize>,
    /// Tokens that each of them generates; the mixed load half to three halves of it [default: 32; on a GPU 128]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = several)]
    pub(crate) tokens: Option<usize>,
    /// Lengths of prompts [default: 128,512; on a GPU 128,512,2048,8192]
    #[arg(long, value_name = "N,...", value_delimiter = ',', allow_negative_numbers = true, value_parser = positive)]
    pub(crate) prefill: Vec<usize>,
    /// Requests a second of the mixed load [default: half of what prefill and decode promise; with --http=URL
    /// there is none without it]
    #[arg(long, value_name = "R", allow_negative_numbers = true, value_parser = per_second)]
    pub(crate) rate: Option<f64>,
    /// Requests of the mixed load [default: 16; on a GPU 128]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) requests: Option<usize>,
    /// Measure through a server, too: one of its own, or the one at URL
    #[arg(long, value_name = "URL", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    pub(crate) http: Option<String>,
    #[command(flatten)]
    pub(crate) output: JsonArg,
    /// Write a model of random weights in this shape, its matrices in the type of --quant
    #[arg(long, value_name = "SHAPE", requires = "quant", conflicts_with = "json")]
    pub(crate) make_random: Option<String>,
    /// Measure random models of these shapes; MODEL is a folder for them [default: in memory]
    #[arg(
        long,
        value_name = "SHAPE,...",
        num_args = 0..=1,
        require_equals = true,
        value_delimiter = ',',
        default_missing_value = "qwen2.5-0.5b,qwen2.5-7b",
        conflicts_with_all = ["make_random", "quant"]
    )]
    pub(crate) shapes: Option<Vec<String>>,
    /// Types of --shapes
    #[arg(long, value_name = "TYPE,...", value_delimiter = ',', default_value = "bf16,q8_0,q4_k_m,q6_k")]
    pub(crate) types: Vec<String>,
    /// Fixes the weights of --make-random, and the times and lengths of the mixed load
    #[arg(long, value_name = "N", default_value = "0")]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

/// What `bench` measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// Prompts
    Prefill,
    /// Streams together
    Decode,
    /// Requests that arrive at random times
    Mixed,
    /// A prompt that is found in the cache
    Prefix,
}

impl Part {
    pub(crate) const ALL: [Part; 4] = [Part::Prefill, Part::Decode, Part::Mixed, Part::Prefix];
}
