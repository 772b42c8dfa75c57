//! Embeddings of encoders against those of transformers in float32.

use std::fs;
use std::path::Path;

use fornax_compute::cpu::Simd;
use fornax_compute::{Pointwise, Pooling};
use fornax_format::Checkpoint;
use fornax_model::{Config, Facts, FirstPosition, Mixer, Rotary, WindowRule};
use serde_json::Value;

use crate::fixture::Container::{Gguf, HuggingFace};
use crate::fixture::{Container, folder, open, open_gguf, open_hugging_face, path, rename, set_u32};
use crate::rig::{Mode, Rig, Room, Share};

/// The most that a value of the tiny checkpoint may differ.
const BOUND: f32 = 2e-5;

struct Golden {
    texts: Vec<Vec<u32>>,
    /// (texts, hidden)
    means: Vec<Vec<f32>>,
    firsts: Vec<Vec<f32>>,
}

fn golden(case: &str) -> Golden {
    let folder = folder().join(case);
    let json: Value = serde_json::from_slice(&fs::read(folder.join("golden.json")).unwrap()).unwrap();
    let texts: Vec<Vec<u32>> = serde_json::from_value(json["texts"].clone()).unwrap();
    let bytes = fs::read(folder.join("golden.bin")).unwrap();
    let values: Vec<f32> =
        bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
    let rows: Vec<Vec<f32>> =
        values.chunks_exact(values.len() / (2 * texts.len())).map(<[f32]>::to_vec).collect();
    let every_other = |from: usize| rows.iter().skip(from).step_by(2).cloned().collect();
    Golden { texts, means: every_other(0), firsts: every_other(1) }
}

fn embeddings(checkpoint: &Checkpoint, config: &Config, mode: Mode, texts: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let tokens_max = texts.iter().map(Vec::len).sum();
    let context = texts.iter().map(Vec::len).max().unwrap();
    let room = Room { tokens_max, sequences: texts.len(), context };
    let mut rig = Rig::new(checkpoint, config, mode, room).unwrap();
    let share = |(slot, tokens): (usize, &'static [u32])| Share { slot, start: 0, tokens };
    let texts: Vec<&'static [u32]> = texts.iter().map(|text| &*text.clone().leak()).collect();
    rig.embed(&texts.into_iter().enumerate().map(share).collect::<Vec<_>>())
}

fn worst(ours: &[Vec<f32>], theirs: &[Vec<f32>]) -> f32 {
    assert_eq!(ours.len(), theirs.len());
    let pairs = ours.concat().into_iter().zip(theirs.concat());
    pairs.map(|(ours, theirs)| (ours - theirs).abs()).fold(0.0, f32::max)
}

/// Every encoder, and how its files pool.
const ALL: &[(&str, Container, Pooling)] = &[
    ("bert", HuggingFace, Pooling::Mean),
    ("bert", Gguf, Pooling::First),
    ("xlm-roberta", HuggingFace, Pooling::Mean),
    ("xlm-roberta", Gguf, Pooling::Mean),
    ("nomic-bert", HuggingFace, Pooling::Mean),
    ("nomic-bert", Gguf, Pooling::First),
    ("modernbert", HuggingFace, Pooling::Mean),
    ("modernbert", Gguf, Pooling::First),
    ("modernbert-words", HuggingFace, Pooling::Mean),
    ("embedding-gemma", HuggingFace, Pooling::Mean),
    ("embedding-gemma", Gguf, Pooling::Mean),
    ("eurobert", HuggingFace, Pooling::Mean),
    ("eurobert", Gguf, Pooling::Mean),
];

#[test]
fn every_text_of_a_batch_agrees_in_both_containers() {
    for &(case, container, pooling) in ALL {
        let (golden, checkpoint) = (golden(case), open(case, container));
        let wanted = if pooling == Pooling::Mean { &golden.means } else { &golden.firsts };
        let config = Config::read(&checkpoint).unwrap_or_else(|error| panic!("{case}: {error}"));
        assert_eq!(config.pooling, Some(pooling), "{case} {container:?}");
        for simd in Simd::present() {
            let ours = embeddings(&checkpoint, &config, Mode { simd, ..Mode::float() }, &golden.texts);
            let error = worst(&ours, wanted);
            println!("{case} {container:?} {simd:?}: {error:e}");
            assert!(error <= BOUND, "{case} {container:?} {simd:?}: {error:e}");
        }
    }
}

#[test]
fn a_decoder_embeds_a_text_as_its_last_token_in_both_containers() {
    let golden = golden("qwen3-embedding");
    for container in [HuggingFace, Gguf] {
        let checkpoint = open("qwen3-embedding", container);
        let config = Config::read(&checkpoint).unwrap();
        assert_eq!((config.pooling, config.tied), (None, true), "{container:?}");
        let error = worst(&embeddings(&checkpoint, &config, Mode::float(), &golden.texts), &golden.firsts);
        assert!(error <= BOUND, "{container:?}: {error:e}");
    }
    let checkpoint = open("qwen3-embedding", HuggingFace);
    let mut config = Config::read(&checkpoint).unwrap();
    config.pool_by(Pooling::Last).unwrap();
    let refused = config.pool_by(Pooling::Mean).unwrap_err().to_string();
    assert!(refused.contains("pooling mean of what is no encoder"), "{refused}");
}

#[test]
fn how_an_encoder_pools_may_be_said() {
    let (golden, checkpoint) = (golden("modernbert"), open("modernbert", Gguf));
    let mut config = Config::read(&checkpoint).unwrap();
    config.pool_by(Pooling::Mean).unwrap();
    let error = worst(&embeddings(&checkpoint, &config, Mode::float(), &golden.texts), &golden.means);
    assert!(error <= BOUND, "{error:e}");
    let mut ranks = Config::read(&open("bert-pair", HuggingFace)).unwrap();
    assert!(ranks.pool_by(Pooling::Mean).is_err());
}

#[test]
fn a_text_among_others_is_what_it_is_alone() {
    for case in ["bert", "modernbert", "embedding-gemma"] {
        let (golden, checkpoint) = (golden(case), open(case, HuggingFace));
        let config = Config::read(&checkpoint).unwrap();
        let together = embeddings(&checkpoint, &config, Mode::float(), &golden.texts);
        for (text, together) in golden.texts.iter().zip(together) {
            let alone = embeddings(&checkpoint, &config, Mode::float(), std::slice::from_ref(text));
            assert_eq!(alone, [together], "{case}");
        }
    }
}

/// Reads a case by changed facts, or changes what was read, and demands that the means move, or that loading refuses.
fn flip(case: &str, container: Container, facts: fn(&mut Facts), change: fn(&mut Config), refused: bool) {
    let (golden, checkpoint) = (golden(case), open(case, container));
    let mut changed = Config::read(&checkpoint).unwrap().facts;
    facts(&mut changed);
    let read = Config::with_facts(&checkpoint, &changed).map(|mut config| {
        change(&mut config);
        config
    });
    let context = golden.texts.iter().map(Vec::len).max().unwrap();
    let room = Room { tokens_max: context, sequences: 1, context };
    let loads = |config: &Config| Rig::new(&checkpoint, config, Mode::float(), room).is_ok();
    match read {
        Ok(config) if !refused => {
            let pooled = Config { pooling: Some(Pooling::Mean), ..config };
            let ours = embeddings(&checkpoint, &pooled, Mode::float(), &golden.texts);
            let moved = worst(&ours, &golden.means);
            assert!(moved >= 10.0 * BOUND, "{case}: {moved:e}");
        }
        Ok(config) => assert!(!loads(&config), "{case}: loaded"),
        Err(error) => assert!(refused, "{case}: {error}"),
    }
}

/// Changes how far the queries of every layer see.
fn reach(config: &mut Config, change: impl Fn(u32) -> Option<u32>) {
    for layer in &mut config.layers {
        if let Mixer::Attention(attention) = &mut layer.mixer {
            attention.reach = attention.reach.and_then(&change);
        }
    }
}

#[test]
fn every_fact_that_tells_encoders_apart_matters() {
    let numbers = |case, container, facts| flip(case, container, facts, |_| {}, false);
    let refuses = |case, container, facts| flip(case, container, facts, |_| {}, true);
    let config = |case, container, change| flip(case, container, |_| {}, change, false);
    numbers("xlm-roberta", HuggingFace, |facts| facts.first_position = FirstPosition::Zero);
    refuses("xlm-roberta", HuggingFace, |facts| facts.first_position = FirstPosition::Third);
    numbers("bert", HuggingFace, |facts| facts.first_position = FirstPosition::BehindPadding);
    config("xlm-roberta", HuggingFace, |config| {
        // The same rows of the table, counted from an earlier one.
        config.first_position -= 1;
        config.context += 1;
    });
    for container in [HuggingFace, Gguf] {
        numbers("modernbert", container, |facts| facts.window = WindowRule::Never);
        config("nomic-bert", container, |config| config.glu = fornax_compute::Glu::Gelu);
        for case in ["modernbert", "embedding-gemma"] {
            config(case, container, |config| reach(config, |near| Some(near + 1)));
            config(case, container, |config| reach(config, |near| Some(near - 1)));
            config(case, container, |config| reach(config, |_| None));
            config(case, container, |config| config.window_rope = Some(config.rope.clone()));
        }
        config("nomic-bert", container, |config| config.rope.base = 10000.0);
        flip("embedding-gemma", container, |_| {}, |config| config.dense = 0, true);
        flip("embedding-gemma", container, |_| {}, |config| config.dense = 40, true);
    }
    numbers("modernbert", Gguf, |facts| facts.window = WindowRule::AllButEvery(3));
    numbers("modernbert-words", HuggingFace, |facts| facts.window = WindowRule::AllButEvery(3));
    numbers("modernbert-words", HuggingFace, |facts| facts.keys = &[("layer_norm_eps", "norm_eps")]);
    config("embedding-gemma", HuggingFace, |config| {
        for layer in &mut config.layers {
            if let Mixer::Attention(attention) = &mut layer.mixer {
                attention.rotary = Rotary::Model;
            }
        }
    });
    refuses("modernbert", HuggingFace, |facts| facts.encoder = false);
    refuses("embedding-gemma", HuggingFace, |facts| facts.encoder = false);
}

#[test]
fn facts_and_numbers_of_encoders_matter() {
    let (golden, checkpoint) = (golden("bert"), open("bert", Container::HuggingFace));
    let check = |change: fn(&mut Config)| {
        let mut config = Config::read(&checkpoint).unwrap();
        change(&mut config);
        let moved = worst(&embeddings(&checkpoint, &config, Mode::float(), &golden.texts), &golden.means);
        assert!(moved >= 10.0 * BOUND, "{moved:e}");
    };
    check(|config| config.pooling = Some(Pooling::First));
    check(|config| config.pooling = Some(Pooling::Last));
    check(|config| config.norm_eps = 1e-6);
    check(|config| config.attention_scale = 0.2);
    check(|config| config.function = Pointwise::GeluTanh);
    let mut config = Config::read(&checkpoint).unwrap();
    config.token_types = 1;
    let room = Room { tokens_max: 8, sequences: 1, context: 8 };
    assert!(Rig::new(&checkpoint, &config, Mode::float(), room).is_err());
    let facts = Facts { encoder: false, ..config.facts };
    let decoder = Config::with_facts(&checkpoint, &facts).unwrap();
    assert!(Rig::new(&checkpoint, &decoder, Mode::float(), room).is_err());
}

/// Pairs of texts: their tokens, where the second begins, and what transformers says of them.
fn pairs(case: &str) -> Vec<(Vec<u32>, usize, f32)> {
    let folder = folder().join(case);
    let json: Value = serde_json::from_slice(&fs::read(folder.join("golden.json")).unwrap()).unwrap();
    let scores = fs::read(folder.join("golden.bin")).unwrap();
    let scores = scores.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
    let pairs = json["pairs"].as_array().unwrap().iter().zip(scores);
    let tokens = |pair: &Value| serde_json::from_value(pair["tokens"].clone()).unwrap();
    pairs.map(|(pair, score)| (tokens(pair), pair["second"].as_u64().unwrap() as usize, score)).collect()
}

/// What a model that reads pairs says of them, where second texts begin as `second` says.
fn scores(
    (case, checkpoint): (&str, &Checkpoint),
    config: &Config,
    mode: Mode,
    second: fn(usize) -> usize,
) -> Vec<f32> {
    let pairs = pairs(case);
    let tokens_max = pairs.iter().map(|(tokens, ..)| tokens.len()).sum();
    let room = Room { tokens_max, sequences: pairs.len(), context: config.context as usize };
    let mut rig = Rig::new(checkpoint, config, mode, room).unwrap();
    let share = |(slot, (tokens, ..)): (usize, &'_ (Vec<u32>, usize, f32))| {
        let tokens: &'static [u32] = tokens.clone().leak();
        Share { slot, start: 0, tokens }
    };
    let shares: Vec<Share<'static>> = pairs.iter().enumerate().map(share).collect();
    let seconds: Vec<usize> = pairs.iter().map(|(tokens, at, _)| second(*at).min(tokens.len())).collect();
    let rows = rig.embed_pairs(&shares, &seconds);
    rows.into_iter().map(|row| <[f32; 1]>::try_from(row).unwrap()[0]).collect()
}

/// How far that is from what transformers says.
fn off(case: &str, ours: &[f32]) -> f32 {
    let wanted = pairs(case).into_iter().map(|(.., score)| score);
    ours.iter().zip(wanted).map(|(ours, wanted)| (ours - wanted).abs()).fold(0.0, f32::max)
}

#[test]
fn two_texts_read_together_fit_as_well_as_transformers_says() {
    for (case, container, pooling, kinds) in [
        ("bert-pair", HuggingFace, Pooling::First, 2),
        ("xlm-roberta-pair", HuggingFace, Pooling::First, 1),
        ("xlm-roberta-pair", Gguf, Pooling::First, 1),
        ("modernbert-pair", HuggingFace, Pooling::Mean, 0),
        ("modernbert-pair", Gguf, Pooling::Mean, 0),
    ] {
        let checkpoint = open(case, container);
        let config = Config::read(&checkpoint).unwrap();
        assert_eq!(
            (config.ranks, config.pooling, config.token_types),
            (true, Some(pooling), kinds),
            "{case}"
        );
        let scores = |config: &Config, mode, second| scores((case, &checkpoint), config, mode, second);
        for simd in Simd::present() {
            let error = off(case, &scores(&config, Mode { simd, ..Mode::float() }, |second| second));
            assert!(error <= 1e-5, "{case} {container:?} {simd:?}: {error:e}");
        }
        // A head that nobody reads is a tensor without a place.
        let headless = Config { ranks: false, ..config.clone() };
        let room = Room { tokens_max: 8, sequences: 1, context: 8 };
        assert!(Rig::new(&checkpoint, &headless, Mode::float(), room).is_err(), "{case}");
        let moves = |changed: &Config, second| {
            let moved = off(case, &scores(changed, Mode::float(), second));
            assert!(moved >= 1e-3, "{case}: {moved:e}");
        };
        // Which text is which matters where tokens have kinds, and where the second begins.
        for wrong in [|_| usize::MAX, |_| 0, |second| second + 1].into_iter().filter(|_| kinds > 1) {
            moves(&config, wrong);
        }
        let other = match config.facts.head_function {
            Pointwise::Gelu => Pointwise::SoftCap(1.0),
            _ => Pointwise::Gelu,
        };
        let facts = Facts { head_function: other, ..config.facts };
        moves(&Config { facts, ..config.clone() }, |second| second);
        moves(&Config { pooling: Some(Pooling::Last), ..config.clone() }, |second| second);
    }
}

#[test]
fn a_classifier_of_several_classes_is_refused_by_name() {
    let refused = |change: fn(&mut Value)| {
        let checkpoint = open_hugging_face("bert-pair", change, |_| {});
        Config::read(&checkpoint).unwrap_err().to_string()
    };
    let three = refused(|config| config["id2label"] = serde_json::json!({"0": "a", "1": "b", "2": "c"}));
    assert!(three.contains("a classifier of 3 classes is not supported"), "{three}");
    let unsaid = refused(|config| drop(config.as_object_mut().unwrap().remove("id2label")));
    assert!(unsaid.contains("a classifier of 2 classes"), "{unsaid}");
}

#[test]
fn pooling_that_is_not_computed_is_refused_by_name() {
    let refused = |checkpoint: &Checkpoint| Config::read(checkpoint).unwrap_err().to_string();
    let ranks = open_gguf("bert", |bytes| set_u32(bytes, "bert.pooling_type", 4));
    // What ranks has a head, and this file has none.
    let room = Room { tokens_max: 8, sequences: 1, context: 8 };
    let headless = Rig::new(&ranks, &Config::read(&ranks).unwrap(), Mode::float(), room).err().unwrap();
    assert!(headless.to_string().contains("tensor \"cls.weight\" is missing"), "{headless}");
    let other = open_gguf("bert", |bytes| set_u32(bytes, "bert.pooling_type", 7));
    assert!(refused(&other).contains("bert.pooling_type 7 is not supported"), "{}", refused(&other));
    let unsaid = open_gguf("bert", |bytes| rename(bytes, "bert.pooling_type", "bert.pooling_typ_"));
    assert_eq!(Config::read(&unsaid).unwrap().pooling, Some(Pooling::Mean));
    let relative =
        open_hugging_face("bert", |config| config["position_embedding_type"] = "relative_key".into(), |_| {});
    assert!(refused(&relative).contains("position_embedding_type \"relative_key\" is not supported"));
}

#[test]
fn sentence_transformers_say_how_they_pool() {
    let check_modules = |more: &str, pooling: &str, wanted: Result<Pooling, &str>| {
        let copy = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(path("bert", Container::HuggingFace)).unwrap() {
            let from = entry.unwrap().path();
            fs::copy(&from, copy.path().join(from.file_name().unwrap())).unwrap();
        }
        let modules = format!(
            r#"[{{"path": "", "type": "sentence_transformers.models.Transformer"}},
            {{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}},
            {{"path": "2", "type": "sentence_transformers.models.{more}"}}]"#
        );
        fs::write(copy.path().join("modules.json"), modules).unwrap();
        fs::create_dir(copy.path().join("1_Pooling")).unwrap();
        fs::write(copy.path().join("1_Pooling/config.json"), pooling).unwrap();
        let opened = Checkpoint::open(copy.path()).map_err(|error| error.to_string());
        let read = opened.and_then(|it| Config::read(&it).map_err(|error| error.to_string()));
        match (read, wanted) {
            (Ok(config), Ok(wanted)) => assert_eq!(config.pooling, Some(wanted)),
            (Err(error), Err(wanted)) => assert!(error.contains(wanted), "{error}"),
            (got, wanted) => panic!("{pooling}: {got:?}, wanted {wanted:?}"),
        }
    };
    let check = |pooling: &str, wanted| check_modules("Normalize", pooling, wanted);
    let dense = "modules.json names \"sentence_transformers.models.Dense\", which is not computed";
    check_modules("Dense", r#"{"pooling_mode_mean_tokens": true}"#, Err(dense));
    check(r#"{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false}"#, Ok(Pooling::Mean));
    check(r#"{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}"#, Ok(Pooling::First));
    check(r#"{"pooling_mode": "lasttoken"}"#, Ok(Pooling::Last));
    check(r#"{"pooling_mode_max_tokens": true}"#, Err("pooling_mode_max_tokens"));
    check(
        r#"{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true}"#,
        Err("is not supported; supported: mean, cls, lasttoken"),
    );
}

#[test]
fn minilm_embeddings_are_those_of_transformers() {
    let model = crate::real::cached("all-minilm-l6-v2/model.safetensors");
    if !model.is_file() {
        let test = "encoder::minilm_embeddings_are_those_of_transformers";
        println!("SKIP {test}: {} is not there", model.display());
        return;
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/minilm.json");
    let json: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("config.json"), json["config"].to_string()).unwrap();
    std::os::unix::fs::symlink(&model, directory.path().join("model.safetensors")).unwrap();
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    let config = Config::read(&checkpoint).unwrap();
    let cases = json["cases"].as_array().unwrap();
    let texts: Vec<Vec<u32>> =
        cases.iter().map(|case| serde_json::from_value(case["tokens"].clone()).unwrap()).collect();
    let wanted: Vec<Vec<f32>> =
        cases.iter().map(|case| serde_json::from_value(case["embedding"].clone()).unwrap()).collect();
    let ours: Vec<Vec<f32>> = embeddings(&checkpoint, &config, Mode::float(), &texts)
        .into_iter()
        .map(|row| {
            let length = row.iter().map(|value| value * value).sum::<f32>().sqrt();
            row.iter().map(|value| value / length).collect()
        })
        .collect();
    let error = worst(&ours, &wanted);
    println!("minilm: at most {error:e} from float32");
    assert!(error <= 1e-4, "{error:e}");
}
