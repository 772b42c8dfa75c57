//! Models that read images: what their towers make of patches, and what the language model makes of that, against
//! transformers; `tests/images/make.py` makes both.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use fornax_compute::cpu::{Cpu, CpuOptions};
use fornax_compute::{Counting, GivenRows, Memory, Purpose, Token};
use fornax_format::{Checkpoint, Gguf};
use fornax_model::{Config, Error, LookAhead, PatchGrid, Tower, TowerConfig};
use serde::Deserialize;

use crate::fixture::Container;
use crate::rig::{Mode, Rig, Room, Seen, Share, distance};

/// How far log-probabilities and rows may be apart.
const BOUND: f64 = 1e-3;
const CASES: [Case; 5] = [
    Case { name: "qwen3-vl", merge: 2, sections: 3, multiplied: 1.0 },
    Case { name: "qwen35", merge: 2, sections: 3, multiplied: 1.0 },
    Case { name: "gemma3", merge: 2, sections: 1, multiplied: ROOT },
    Case { name: "gemma4", merge: 3, sections: 1, multiplied: ROOT },
    Case { name: "gemma4-e", merge: 3, sections: 1, multiplied: ROOT },
];
/// Where pictures are read, in all of them.
const PLACEHOLDER: u32 = 261;
/// Of the width of all of them: what Gemma multiplies embeddings by, and what its towers' rows are divided by.
const ROOT: f32 = 6.928_203_4;

/// A tiny model and what its pictures are like.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    /// Patches on a side of a row.
    merge: u32,
    sections: usize,
    /// What the language model multiplies rows by.
    multiplied: f32,
}

#[derive(Deserialize)]
struct Golden {
    /// Down and across.
    grids: Vec<[u32; 2]>,
    prompt: Vec<u32>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/images")
}

fn open(case: &str, container: Container) -> Checkpoint {
    match container {
        Container::HuggingFace => Checkpoint::open(&folder().join(case)).unwrap(),
        Container::Gguf => {
            let mut gguf = Gguf::open(&folder().join(format!("{case}.gguf"))).unwrap();
            gguf.add(&folder().join(format!("mmproj-{case}.gguf"))).unwrap();
            Checkpoint::Gguf(gguf)
        }
    }
}

/// The golden file, and its numbers.
fn golden(case: &str) -> (Golden, Vec<f32>) {
    let json = fs::read(folder().join(case).join("golden.json")).unwrap();
    let bytes = fs::read(folder().join(case).join("golden.bin")).unwrap();
    let numbers = bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
    (serde_json::from_slice(&json).unwrap(), numbers)
}

/// Where patches are: those of a token together.
fn places([height, width]: [u32; 2], merge: u32) -> Vec<(u32, u32)> {
    let blocks = (0..height / merge).flat_map(|down| (0..width / merge).map(move |across| (down, across)));
    let of_block = |(down, across): (u32, u32)| {
        let each = (0..merge).flat_map(move |y| (0..merge).map(move |x| (y, x)));
        each.map(move |(y, x)| (merge * down + y, merge * across + x))
    };
    blocks.flat_map(of_block).collect()
}

/// The formula of the script.
fn patch_values(patches: usize) -> Vec<f32> {
    let value = |at: usize| ((at * 7919 + at / 48 * 31) % 1001) as f32 / 500.0 - 1.0;
    (0..patches * 48).map(value).collect()
}

struct Seeing {
    cpu: Cpu,
    tower: Tower<Cpu>,
}

impl Seeing {
    fn new(checkpoint: &Checkpoint, config: &TowerConfig) -> Seeing {
        let cpu =
            Cpu::new(CpuOptions { threads: 2, tokens_max: 72, slots: 1, depth: 1, ..CpuOptions::default() });
        let cpu = cpu.unwrap();
        let tower = Tower::load(checkpoint, config, &cpu, 64, &mut |_| {}).unwrap();
        Seeing { cpu, tower }
    }

    fn see(&mut self, grid: [u32; 2]) -> Vec<f32> {
        let merge = u32::try_from(self.tower.config().merge).unwrap();
        let (places, [height, width]) = (places(grid, merge), grid);
        let values = patch_values(places.len());
        let grid = PatchGrid { width, height, places: &places, values: &values };
        self.tower.see(&self.cpu, grid, &|| true).unwrap().unwrap()
    }
}

fn read(case: &str, container: Container) -> (Checkpoint, Config, TowerConfig) {
    let checkpoint = open(case, container);
    let mut config = Config::read(&checkpoint).unwrap();
    let tower = TowerConfig::read(&checkpoint, &config).unwrap().expect("a tower");
    config.see(&tower);
    (checkpoint, config, tower)
}

const BOTH: [Container; 2] = [Container::HuggingFace, Container::Gguf];

#[test]
fn rows_of_pictures_are_those_of_transformers_in_both_containers() {
    for Case { name: case, merge, multiplied, .. } in CASES {
        let (golden, numbers) = golden(case);
        for container in BOTH {
            let (checkpoint, config, tower) = read(case, container);
            assert_eq!((config.given(), tower.merge), (Some(tower.columns()), merge as usize));
            let mut seeing = Seeing::new(&checkpoint, &tower);
            let rows: Vec<f32> = golden.grids.iter().flat_map(|grid| seeing.see(*grid)).collect();
            let wanted = &numbers[..rows.len()];
            let apart =
                rows.iter().zip(wanted).map(|(ours, theirs)| f64::from((ours * multiplied - theirs).abs()));
            let apart = apart.fold(0.0, f64::max);
            println!("{case} {container:?}: rows at most {apart:.1e} apart");
            assert!(apart < BOUND, "{case} {container:?}: {apart}");
            // A picture is the same whatever was seen before it.
            let again = Seeing::new(&checkpoint, &tower).see(golden.grids[1]);
            let count = tower.columns();
            let square = (merge * merge) as usize;
            let first: usize = golden.grids[0].iter().product::<u32>() as usize / square * count;
            assert_eq!(again, rows[first..][..again.len()]);
        }
    }
}

/// What a model is shown: tokens, rows in place of some of them, and where they are.
fn shown(golden: &Golden, seeing: &mut Seeing, case: Case) -> Seen {
    let (merge, columns) = (case.merge, seeing.tower.config().columns());
    let mut values = Vec::new();
    let mut sections = vec![Vec::new(); case.sections];
    let mut lasts = Vec::new();
    let (mut row, mut grids, mut at) = (0, golden.grids.iter(), 0);
    let mut tokens = golden.prompt.iter().peekable();
    let mut read = Vec::new();
    while let Some(&token) = tokens.next() {
        if token != PLACEHOLDER {
            read.push(Token::Known(token));
            sections.iter_mut().for_each(|section| section.push(at));
            lasts.push(u32::try_from(lasts.len()).unwrap());
            at += 1;
            continue;
        }
        let [height, width] = *grids.next().unwrap();
        values.extend(seeing.see([height, width]));
        let (count, begin) = (height / merge * (width / merge), u32::try_from(lasts.len()).unwrap());
        for y in 0..height / merge {
            for x in 0..width / merge {
                read.push(Token::Given(row));
                row += 1;
                let in_line = y * (width / merge) + x;
                let place = if case.sections == 1 { [in_line, 0, 0] } else { [0, y, x] };
                for (section, place) in sections.iter_mut().zip(place) {
                    section.push(at + place);
                }
                lasts.push(begin + count - 1);
                if (y, x) != (0, 0) {
                    assert_eq!(tokens.next(), Some(&PLACEHOLDER));
                }
            }
        }
        at += if case.sections == 1 { count } else { height.max(width) / merge };
    }
    Seen { tokens: read, given: GivenRows { columns, values }, sections, lasts }
}

fn logits(rig: &mut Rig, seen: &Seen, chunk: usize) -> Vec<Vec<f32>> {
    let starts = (0..seen.tokens.len()).step_by(chunk);
    let part = |start: usize| -> Range<usize> { start..(start + chunk).min(seen.tokens.len()) };
    starts.flat_map(|start| rig.show(0, part(start), seen)).collect()
}

#[test]
fn log_probabilities_behind_several_pictures_are_those_of_transformers_in_any_chunks() {
    for own in CASES {
        let case = own.name;
        let (golden, numbers) = golden(case);
        for container in BOTH {
            let (checkpoint, config, tower) = read(case, container);
            let mut seeing = Seeing::new(&checkpoint, &tower);
            let mut seen = shown(&golden, &mut seeing, own);
            let whole = config.looks_ahead != LookAhead::Never;
            if !whole {
                seen.lasts.clear();
            }
            let rows = seen.given.values.len();
            let wanted = &numbers[rows..][..golden.prompt.len() * config.vocab];
            let wanted: Vec<Vec<f32>> = wanted.chunks_exact(config.vocab).map(<[f32]>::to_vec).collect();
            let room = Room { tokens_max: 96, sequences: 2, context: 96 };
            let rig = || Rig::new(&checkpoint, &config, Mode::float(), room).unwrap();
            let whole_logits = logits(&mut rig(), &seen, 96);
            let apart = distance(&whole_logits, &wanted);
            println!("{case} {container:?}: log-probabilities at most {apart:.1e} apart");
            assert!(apart < BOUND, "{case} {container:?}: {apart}");
            // Borders of chunks inside pictures change no bit, of pictures that are not read in both directions.
            if whole {
                let border = golden.prompt.iter().rposition(|token| *token == PLACEHOLDER).unwrap() + 1;
                let mut cut = rig();
                let parts = [0..border, border..seen.tokens.len()].map(|part| cut.show(0, part, &seen));
                assert_eq!(parts.concat(), whole_logits, "{case} in two");
                // A picture whose first rows were kept from before.
                let first = golden.prompt.iter().position(|token| *token == PLACEHOLDER).unwrap();
                let rest = cut.show(0, first + 2..seen.tokens.len(), &seen);
                assert_eq!(rest, whole_logits[first + 2..], "{case} from the midst of a picture");
            }
            for chunk in [1, 7, 32].into_iter().filter(|_| !whole) {
                assert_eq!(logits(&mut rig(), &seen, chunk), whole_logits, "{case} in chunks of {chunk}");
            }
            // Beside a sequence of text alone.
            let mut both = rig();
            let text = both.step(&[Share { slot: 1, start: 0, tokens: &golden.prompt[..3] }]);
            assert_eq!(logits(&mut both, &seen, 96), whole_logits);
            let apart = both.show_beside(0..seen.tokens.len(), &seen, &golden.prompt[..3]);
            let (first, second) = apart.split_at(whole_logits.len());
            assert_eq!((first, second), (&whole_logits[..], &text[..]));
        }
    }
}

#[test]
fn each_number_that_pictures_depend_on_matters() {
    let (golden, _) = golden("qwen3-vl");
    let (checkpoint, config, tower) = read("qwen3-vl", Container::HuggingFace);
    let mut seeing = Seeing::new(&checkpoint, &tower);
    let mut seen = shown(&golden, &mut seeing, CASES[0]);
    seen.lasts.clear();
    let room = Room { tokens_max: 64, sequences: 1, context: 96 };
    let logits = |config: &Config, seen: &Seen| {
        logits(&mut Rig::new(&checkpoint, config, Mode::float(), room).unwrap(), seen, 64)
    };
    let whole = logits(&config, &seen);
    let far = |what: &str, changed: Vec<Vec<f32>>| {
        let apart = distance(&changed, &whole);
        assert!(apart > 10.0 * BOUND, "{what}: {apart}");
    };
    far("sections", logits(&Config { sections: vec![0; config.rope.dims / 2], ..config.clone() }, &seen));
    far("levels", logits(&Config { levels: Some(0), ..config.clone() }, &seen));
    let mut turned = seen.clone();
    turned.sections.swap(1, 2);
    far("places", logits(&config, &turned));
    let base = seeing.see([6, 10]);
    let moved = |change: fn(&mut Vec<(u32, u32)>)| {
        let mut places = places([6, 10], 2);
        change(&mut places);
        let values = patch_values(places.len());
        let grid = PatchGrid { width: 10, height: 6, places: &places, values: &values };
        let Seeing { cpu, tower } = &mut Seeing::new(&checkpoint, &tower);
        tower.see(cpu, grid, &|| true).unwrap().unwrap()
    };
    assert_eq!(moved(|_| {}), base);
    let far = moved(|places| places.rotate_left(4));
    assert!(far.iter().zip(&base).any(|(a, b)| (a - b).abs() > 0.01));
    // Given up on the way, nothing comes of it.
    let (places, values) = (places([2, 2], 2), patch_values(4));
    let grid = PatchGrid { width: 2, height: 2, places: &places, values: &values };
    assert_eq!(seeing.tower.see(&seeing.cpu, grid, &|| false).unwrap(), None);
}

#[test]
fn what_reads_pictures_in_both_directions_and_in_which_layers_matters() {
    for own in CASES.iter().filter(|case| ["gemma3", "gemma4"].contains(&case.name)) {
        let (golden, _) = golden(own.name);
        let (checkpoint, config, tower) = read(own.name, Container::HuggingFace);
        let mut seeing = Seeing::new(&checkpoint, &tower);
        let seen = shown(&golden, &mut seeing, *own);
        let room = Room { tokens_max: 96, sequences: 1, context: 96 };
        let logits = |looks_ahead| {
            let config = Config { looks_ahead, ..config.clone() };
            logits(&mut Rig::new(&checkpoint, &config, Mode::float(), room).unwrap(), &seen, 96)
        };
        let own_way = logits(config.looks_ahead);
        for other in [LookAhead::Never, LookAhead::Everywhere, LookAhead::InWindows] {
            let apart = distance(&logits(other), &own_way);
            println!("{} {other:?}: {apart:.1e} apart", own.name);
            assert_eq!(apart > 10.0 * BOUND, other != config.looks_ahead, "{} {other:?}: {apart}", own.name);
        }
    }
}

#[test]
fn a_tower_takes_the_bytes_that_were_counted() {
    for case in CASES {
        let (checkpoint, _, config) = read(case.name, Container::HuggingFace);
        let Seeing { cpu, tower } = Seeing::new(&checkpoint, &config);
        let counting = Counting::new(cpu.sizes().clone());
        drop(Tower::load(&checkpoint, &config, &counting, 64, &mut |_| {}).unwrap());
        for purpose in Purpose::ALL {
            assert_eq!(counting.usage().bytes(purpose), cpu.usage().bytes(purpose), "{purpose}");
        }
        drop(tower);
    }
}

#[test]
fn patches_that_contradict_each_other_are_refused() {
    let (checkpoint, _, config) = read("qwen35", Container::HuggingFace);
    let Seeing { cpu, mut tower } = Seeing::new(&checkpoint, &config);
    let mut refuse = |width, height, places: &[(u32, u32)], values: &[f32]| {
        let grid = PatchGrid { width, height, places, values };
        tower.see(&cpu, grid, &|| true).unwrap_err().to_string()
    };
    let (four, values) = (places([2, 2], 2), patch_values(4));
    assert!(refuse(2, 2, &[], &[]).contains("patches"));
    assert!(refuse(3, 2, &four, &values).contains("patches of the grid"));
    assert!(refuse(2, 2, &four, &values[1..]).contains("values of patches"));
    assert!(refuse(2, 2, &[(0, 0), (0, 1), (1, 0), (2, 1)], &values).contains("row of a patch"));
    let many = places([2, 36], 2);
    assert!(refuse(36, 2, &many, &patch_values(72)).contains("patches"));
}

#[test]
fn files_of_towers_that_are_wrong_are_refused_by_name() {
    let refused = |change: &dyn Fn(&mut serde_json::Value), wanted: &str| {
        let scratch = tempfile::tempdir().unwrap();
        for name in ["config.json", "model.safetensors"] {
            fs::copy(folder().join("qwen3-vl").join(name), scratch.path().join(name)).unwrap();
        }
        let path = scratch.path().join("config.json");
        let mut json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut json);
        fs::write(&path, serde_json::to_vec(&json).unwrap()).unwrap();
        let checkpoint = Checkpoint::open(scratch.path()).unwrap();
        let result = Config::read(&checkpoint)
            .and_then(|config| TowerConfig::read(&checkpoint, &config))
            .and_then(|tower| {
                let cpu =
                    Cpu::new(CpuOptions { threads: 1, tokens_max: 8, slots: 1, ..CpuOptions::default() });
                Tower::load(&checkpoint, &tower.unwrap(), &cpu.unwrap(), 8, &mut |_| {}).map(drop)
            });
        let said = result.unwrap_err().to_string();
        assert!(said.contains(wanted), "{said:?} lacks {wanted:?}");
    };
    let vision = |key: &'static str, value: serde_json::Value| {
        move |json: &mut serde_json::Value| json["vision_config"][key] = value.clone()
    };
    refused(&vision("hidden_act", "silu".into()), "vision_config.hidden_act");
    refused(&vision("num_position_embeddings", 26.into()), "a square");
    refused(&vision("out_hidden_size", 32.into()), "the language model's 48");
    refused(&vision("deepstack_visual_indexes", serde_json::json!([2, 0])), "blocks, ascending");
    refused(&vision("deepstack_visual_indexes", serde_json::json!([0])), "deepstack_merger_list.1");
    refused(&vision("depth", 4.into()), "blocks.3");
    refused(&vision("num_heads", 3.into()), "heads of a multiple of four");
    refused(&vision("patch_size", 1000.into()), "1 to 64");
    refused(
        &|json| json["text_config"]["rope_parameters"]["mrope_section"] = serde_json::json!([1, 1, 1]),
        "8 pairs",
    );
    let sections = |json: &mut serde_json::Value| {
        json["text_config"]["rope_parameters"]["mrope_interleaved"] = false.into();
    };
    refused(&sections, "mrope_interleaved");
}

#[test]
fn a_file_of_another_projector_is_refused_by_its_name() {
    let mut gguf = Gguf::open(&folder().join("qwen3-vl.gguf")).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("mmproj.gguf");
    let bytes = fs::read(folder().join("mmproj-qwen3-vl.gguf")).unwrap();
    let at = bytes.windows(14).position(|name| name == b"qwen3vl_merger").unwrap();
    let mut other = bytes.clone();
    other[at..at + 14].copy_from_slice(b"otherx1_merger");
    fs::write(&path, other).unwrap();
    gguf.add(&path).unwrap();
    let checkpoint = Checkpoint::Gguf(gguf);
    let config = Config::read(&checkpoint).unwrap();
    let error = TowerConfig::read(&checkpoint, &config).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what.contains("otherx1_merger")), "{error}");
    // Without a file beside it a model reads text alone.
    let alone = Checkpoint::Gguf(Gguf::open(&folder().join("qwen3-vl.gguf")).unwrap());
    assert_eq!(TowerConfig::read(&alone, &Config::read(&alone).unwrap()).unwrap(), None);
}
