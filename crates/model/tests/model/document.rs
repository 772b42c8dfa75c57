//! `docs/models.md`, which is made of the table of architectures and of the checkpoints beside these tests.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use fornax_compute::Need;
use fornax_format::Checkpoint;
use fornax_model::{Config, Facts, exportable};

use crate::fixture::{Container, folder};

/// What CUDA does not have; the refusals in its own tests list the same.
const NOT_ON_CUDA: [Need; 15] = [
    Need::GivenRows,
    Need::Sections,
    Need::LastSeen,
    Need::Reach,
    Need::SharedKeys,
    Need::WideGroups,
    Need::LayerEmbeddings,
    Need::ExpertScales,
    Need::Latent,
    Need::Temperature,
    Need::Chunks,
    Need::WeighedInputs,
    Need::Xielu,
    Need::ChannelScan,
    Need::HostTables,
];

/// A checkpoint that tests compute.
struct Tested {
    name: &'static str,
    container: Container,
    needs: Vec<Need>,
}

fn tested() -> Vec<Tested> {
    // Those that read images have a folder of their own, with their towers beside them.
    let folders = [folder(), folder().join("../images")];
    let entries = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap());
    let paths = entries.map(|entry| entry.unwrap().path());
    let is_tower = |path: &Path| path.file_name().unwrap().to_string_lossy().starts_with("mmproj");
    let mut paths: Vec<_> = paths.filter(|path| !is_tower(path)).collect();
    paths.sort();
    let checkpoints = paths.iter().filter_map(|path| {
        let container = match path.is_dir() {
            true if path.join("config.json").is_file() => Container::HuggingFace,
            false if path.extension().is_some_and(|extension| extension == "gguf") => Container::Gguf,
            _ => return None,
        };
        let config = Config::read(&Checkpoint::open(path).unwrap()).unwrap();
        Some(Tested { name: config.facts.name, container, needs: config.needs() })
    });
    checkpoints.collect()
}

fn document() -> String {
    let tested = tested();
    let mut text = "\
# Models

Made by `cargo xtask models` from the table of architectures (`crates/model/src/arch`); a test says when it is not
current. A file whose architecture is not here is refused by its name; `fornax inspect MODEL` says which operation is
missing where that is known.

Every row is tested with tiny random checkpoints, made by transformers and converted by llama.cpp's converter:
log-probabilities at every position within 1e-3 of transformers' own in float32, on the CPU. \"Tested\" counts them by
container: HF is a Hugging Face directory. Each fact of the table is also changed once, and the change must show. A device
computes a model where it has every operation that is asked for beyond those of a Llama. \"Convert\" says whether
`fornax convert` makes GGUF files of it.

| Family | `model_type` | GGUF | CPU | CUDA | Convert | Tested | Asks for |
|---|---|---|---|---|---|---|---|
"
    .to_owned();
    let mut both = 0;
    for facts in Facts::TABLE {
        let own: Vec<&Tested> = tested.iter().filter(|tested| tested.name == facts.name).collect();
        assert!(!own.is_empty(), "{} has no checkpoint", facts.name);
        let count = |container| own.iter().filter(|tested| tested.container == container).count();
        let containers = [Container::HuggingFace, Container::Gguf].map(count);
        both += usize::from(containers.iter().all(|count| *count > 0));
        let needs: BTreeSet<String> =
            own.iter().flat_map(|tested| &tested.needs).map(ToString::to_string).collect();
        let cuda = !own.iter().flat_map(|tested| &tested.needs).any(|need| NOT_ON_CUDA.contains(need));
        let code =
            |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        writeln!(
            text,
            "| {} | {} | {} | yes | {} | {} | {} HF, {} GGUF | {} |",
            facts.name,
            // Some share their type with others, and only their class tells them apart.
            code(if facts.model_types.is_empty() { facts.classes } else { facts.model_types }),
            facts.gguf.map_or("none of its own".to_owned(), |name| code(&[name])),
            if cuda { "yes" } else { "no" },
            if exportable().any(|name| name == facts.name) { "yes" } else { "no" },
            containers[0],
            containers[1],
            needs.into_iter().collect::<Vec<_>>().join("; "),
        )
        .unwrap();
    }
    let all = Facts::TABLE.len();
    writeln!(text, "\n{all} families, {both} of them tested in both containers.").unwrap();
    text
}

#[test]
fn the_document_of_models_is_current() {
    let current = document();
    let stored = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/models.md");
    if fs::read_to_string(stored).unwrap_or_default() != current {
        fs::write(Path::new(env!("CARGO_TARGET_TMPDIR")).join("models.md"), current).unwrap();
        panic!("docs/models.md is not current: run `cargo xtask models`");
    }
}
