//! What the fuzz targets do with an input, apart from libFuzzer so that a corpus can be replayed without it.
//!
//! An input of `gguf` and `safetensors` is one file, or several with [`SEPARATOR`] between them, and nothing touches
//! the disk. What the others do is in a file each, which the tests of the crates include, too.

mod adapter;
mod body;
#[path = "../../crates/server/tests/http/client.rs"]
#[expect(dead_code, reason = "shared with the server's tests")]
mod client;
mod form;
mod frame;
#[path = "../../crates/text/tests/support/mod.rs"]
mod support;
mod template;
mod tokenizer;
#[path = "../../crates/server/tests/http/world.rs"]
#[expect(dead_code, reason = "shared with the server's tests")]
mod world;

use std::cell::RefCell;
use std::hint::black_box;
use std::path::Path;
use std::sync::LazyLock;

use fornax_form::Grammars;
use fornax_format::{Error, Gguf, Metadata, Safetensors, Value, View};
use fornax_text::{Chat, Tokenizer};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use world::{Setup, World};

/// Stands between the files of an input that is a model in several files.
pub const SEPARATOR: &[u8] = b"\xffFILE\xff";

/// What is made once for all inputs.
struct Bench {
    chat: Chat,
    bytes: Tokenizer,
    grammars: Grammars,
    tokenizer: TempDir,
    adapter: adapter::Bench,
    /// Where adapters are written.
    _adapter: TempDir,
}

thread_local! {
    static BENCH: Bench = {
        let folder = || tempfile::tempdir().expect("a folder can be made");
        let (tokenizer, stranger) = (folder(), folder());
        tokenizer::prepare(tokenizer.path());
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/model/tests/fixtures/llama");
        Bench {
            chat: template::chat(),
            bytes: support::bytes_tokenizer(),
            grammars: form::grammars(),
            tokenizer,
            adapter: adapter::Bench::new(&model, stranger.path().to_owned()),
            _adapter: stranger,
        }
    };
}

/// Renders a chat with the input as its template.
pub fn template(data: &[u8]) {
    let Ok(source) = std::str::from_utf8(data) else { return };
    BENCH.with(|bench| template::template(source, &bench.chat, &bench.bytes));
}

/// Encodes and decodes with the input as `tokenizer.json`.
pub fn tokenizer(data: &[u8]) {
    BENCH.with(|bench| tokenizer::tokenizer(bench.tokenizer.path(), data));
}

/// Compiles the input as a form, and writes an answer to it.
pub fn form(data: &[u8]) {
    BENCH.with(|bench| form::form(&bench.grammars, data));
}

/// Sends the input, a route and a body for it, to a server that runs.
pub fn body(data: &[u8]) {
    thread_local! {
        static CALLER: RefCell<body::Caller> = RefCell::new(body::Caller::new(SERVER.world.address));
    }
    CALLER.with_borrow_mut(|caller| caller.body(data));
}

/// A server that runs as long as this process does.
struct Server {
    world: World,
    _runtime: Runtime,
    /// Where its jobs are kept.
    _folder: TempDir,
}

static SERVER: LazyLock<Server> = LazyLock::new(|| {
    let runtime = Runtime::new().expect("threads can be had");
    let folder = tempfile::tempdir().expect("a folder can be made");
    let said = "{\"a\":5} and <tool_call>{\"name\":\"look\",\"arguments\":{}}";
    let setup = world::keeping(folder.path(), Setup { context: 512, ..Setup::skilled(said) });
    let world = runtime.block_on(World::ready(setup));
    Server { world, _runtime: runtime, _folder: folder }
});

/// Reads the input as frames of private inference.
pub fn frame(data: &[u8]) {
    frame::frame(data);
}

/// Reads the input as an adapter, and checks it against a model.
pub fn adapter(data: &[u8]) {
    BENCH.with(|bench| bench.adapter.adapter(data));
}

/// Reads the input as a GGUF model and its shards, then its pairs and every view to its end.
pub fn gguf(data: &[u8]) {
    let opened = Gguf::from_bytes(files(data));
    match &opened {
        Ok(gguf) => {
            read_metadata(gguf.metadata(), data.len());
            let total = read_views(gguf.tensors());
            assert_eq!(total, gguf.data_bytes());
            assert!(gguf.data_bytes() <= gguf.file_bytes());
            for view in gguf.tensors() {
                assert_eq!(gguf.tensor(view.name).as_ref(), Some(&view));
            }
        }
        Err(error) => read_error(error),
    }
}

/// Reads the input as one safetensors file, or as an index and the shards "1", "2" … behind it, then every view to
/// its end. One file must be accepted exactly when the safetensors crate accepts it, but for our additional rules.
pub fn safetensors(data: &[u8]) {
    let mut files = files(data);
    let single = files.len() == 1;
    let first = files.remove(0);
    let opened = if single {
        Safetensors::from_bytes(first)
    } else {
        let names = (1..).map(|number: usize| number.to_string());
        Safetensors::from_shards(first, names.zip(files).collect())
    };
    match &opened {
        Ok(model) => {
            let total = read_views(model.tensors());
            assert_eq!(total, model.data_bytes());
            assert!(model.data_bytes() <= model.file_bytes());
            for view in model.tensors() {
                assert_eq!(model.tensor(view.name).as_ref(), Some(&view));
            }
        }
        Err(error) => read_error(error),
    }
    if single {
        compare(data, &opened);
    }
}

fn compare(data: &[u8], opened: &Result<Safetensors, Error>) {
    match (opened, safetensors::SafeTensors::deserialize(data)) {
        (Ok(ours), Ok(reference)) => {
            assert_eq!(ours.tensors().count(), reference.len());
            for (name, tensor) in reference.iter() {
                let view = ours.tensor(name).expect("the reference has it");
                assert_eq!((&*view.shape, view.bytes), (tensor.shape(), tensor.data()));
            }
        }
        (Ok(_), Err(error)) => panic!("accepted, but the reference says {error}"),
        (Err(error), Ok(_)) => {
            let stricter = matches!(
                error.fault(),
                Error::DuplicateTensor { .. }
                    | Error::Dimensions { .. }
                    | Error::RaggedRow { .. }
                    | Error::TensorOverflow { .. }
            );
            assert!(stricter, "refused, but the reference accepts: {error}");
        }
        (Err(_), Err(_)) => {}
    }
}

fn files(data: &[u8]) -> Vec<Vec<u8>> {
    let mut files = Vec::new();
    let mut begin = 0;
    for (at, _) in data.iter().enumerate().filter(|&(_, &byte)| byte == SEPARATOR[0]) {
        if at >= begin && data[at..].starts_with(SEPARATOR) {
            files.push(data[begin..at].to_vec());
            begin = at + SEPARATOR.len();
        }
    }
    files.push(data[begin..].to_vec());
    files
}

/// Sums every byte of every view and gives their total length.
fn read_views<'a>(views: impl Iterator<Item = View<'a>>) -> u64 {
    let mut total = 0;
    for view in views {
        black_box(view.bytes.iter().fold(0u8, |sum, &byte| sum.wrapping_add(byte)));
        assert_eq!(view.values(), view.shape.iter().product::<usize>());
        if let Some(&rows) = view.shape.first() {
            black_box(view.rows(rows / 2..rows).is_ok());
        }
        total += view.bytes.len() as u64;
    }
    total
}

/// Finds every pair, and asks for one, chosen by `choice`, as every type.
fn read_metadata(metadata: &Metadata, choice: usize) {
    for (key, value) in metadata.iter() {
        assert_eq!(metadata.get(key).map(std::mem::discriminant), Some(std::mem::discriminant(value)));
    }
    let count = metadata.iter().len().max(1);
    if let Some((key, value)) = metadata.iter().nth(choice % count) {
        black_box(value.type_name());
        if let Value::Array(array) = value {
            black_box((array.len(), array.is_empty()));
        }
        black_box((metadata.u32(key).is_ok(), metadata.u64(key).is_ok(), metadata.f32(key).is_ok()));
        black_box((metadata.bool(key).is_ok(), metadata.str(key).is_ok(), metadata.strings(key).is_ok()));
        black_box((metadata.i32s(key).is_ok(), metadata.u32s(key).is_ok(), metadata.f32s(key).is_ok()));
    }
}

/// An error must say itself in one line that no terminal obeys.
fn read_error(error: &Error) {
    let message = error.to_string();
    assert!(!message.is_empty() && !message.contains(char::is_control), "{message:?}");
}
