//! Embeddings of encoders against those of transformers in float32.

use std::fs;
use std::path::Path;

use fornax_compute::Pooling;
use fornax_compute::cpu::Simd;
use fornax_format::Checkpoint;
use fornax_model::{Config, Facts};
use serde_json::Value;

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

fn golden() -> Golden {
    let folder = folder().join("bert");
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

#[test]
fn every_text_of_a_batch_agrees_in_both_containers() {
    let golden = golden();
    for (container, pooling, wanted) in [
        (Container::HuggingFace, Pooling::Mean, &golden.means),
        (Container::Gguf, Pooling::First, &golden.firsts),
    ] {
        let checkpoint = open("bert", container);
        let config = Config::read(&checkpoint).unwrap();
        assert_eq!(config.pooling, Some(pooling));
        for simd in Simd::present() {
            let ours = embeddings(&checkpoint, &config, Mode { simd, ..Mode::float() }, &golden.texts);
            let error = worst(&ours, wanted);
            assert!(error <= BOUND, "{container:?} {simd:?}: {error:e}");
        }
    }
}

#[test]
fn a_text_among_others_is_what_it_is_alone() {
    let (golden, checkpoint) = (golden(), open("bert", Container::HuggingFace));
    let config = Config::read(&checkpoint).unwrap();
    let together = embeddings(&checkpoint, &config, Mode::float(), &golden.texts);
    for (text, together) in golden.texts.iter().zip(together) {
        let alone = embeddings(&checkpoint, &config, Mode::float(), std::slice::from_ref(text));
        assert_eq!(alone, [together]);
    }
}

#[test]
fn facts_and_numbers_of_encoders_matter() {
    let (golden, checkpoint) = (golden(), open("bert", Container::HuggingFace));
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
    check(|config| config.glu = fornax_compute::Glu::GeluTanh);
    let mut config = Config::read(&checkpoint).unwrap();
    config.token_types = 1;
    let room = Room { tokens_max: 8, sequences: 1, context: 8 };
    assert!(Rig::new(&checkpoint, &config, Mode::float(), room).is_err());
    let facts = Facts { encoder: false, ..config.facts };
    let decoder = Config::with_facts(&checkpoint, &facts).unwrap();
    assert!(Rig::new(&checkpoint, &decoder, Mode::float(), room).is_err());
}

/// Pairs of texts: their tokens, where the second begins, and what transformers says of them.
fn pairs() -> Vec<(Vec<u32>, usize, f32)> {
    let folder = folder().join("bert-pair");
    let json: Value = serde_json::from_slice(&fs::read(folder.join("golden.json")).unwrap()).unwrap();
    let scores = fs::read(folder.join("golden.bin")).unwrap();
    let scores = scores.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
    let pairs = json["pairs"].as_array().unwrap().iter().zip(scores);
    let tokens = |pair: &Value| serde_json::from_value(pair["tokens"].clone()).unwrap();
    pairs.map(|(pair, score)| (tokens(pair), pair["second"].as_u64().unwrap() as usize, score)).collect()
}

/// What a model that reads pairs says of them, where second texts begin as `second` says.
fn scores(config: &Config, mode: Mode, second: fn(usize) -> usize) -> Vec<f32> {
    let checkpoint = open("bert-pair", Container::HuggingFace);
    let pairs = pairs();
    let tokens_max = pairs.iter().map(|(tokens, ..)| tokens.len()).sum();
    let room = Room { tokens_max, sequences: pairs.len(), context: config.context as usize };
    let mut rig = Rig::new(&checkpoint, config, mode, room).unwrap();
    let share = |(slot, (tokens, ..)): (usize, &'_ (Vec<u32>, usize, f32))| {
        let tokens: &'static [u32] = tokens.clone().leak();
        Share { slot, start: 0, tokens }
    };
    let shares: Vec<Share<'static>> = pairs.iter().enumerate().map(share).collect();
    let seconds: Vec<usize> = pairs.iter().map(|(tokens, at, _)| second(*at).min(tokens.len())).collect();
    let rows = rig.embed_pairs(&shares, &seconds);
    rows.into_iter().map(|row| <[f32; 1]>::try_from(row).unwrap()[0]).collect()
}

#[test]
fn two_texts_read_together_fit_as_well_as_transformers_says() {
    let checkpoint = open("bert-pair", Container::HuggingFace);
    let config = Config::read(&checkpoint).unwrap();
    assert_eq!((config.ranks, config.pooling, config.token_types), (true, Some(Pooling::First), 2));
    let wanted: Vec<f32> = pairs().into_iter().map(|(.., score)| score).collect();
    let worst = |ours: &[f32]| {
        ours.iter().zip(&wanted).map(|(ours, wanted)| (ours - wanted).abs()).fold(0.0, f32::max)
    };
    for simd in Simd::present() {
        let error = worst(&scores(&config, Mode { simd, ..Mode::float() }, |second| second));
        assert!(error <= 1e-5, "{simd:?}: {error:e}");
    }
    // A head that nobody reads is a tensor without a place.
    let headless = Config { ranks: false, ..config.clone() };
    let room = Room { tokens_max: 8, sequences: 1, context: 8 };
    assert!(Rig::new(&checkpoint, &headless, Mode::float(), room).is_err());
    // Which text is which matters, and where the second begins.
    for wrong in [|_| usize::MAX, |_| 0, |second| second + 1] {
        let moved = worst(&scores(&config, Mode::float(), wrong));
        assert!(moved >= 1e-3, "{moved:e}");
    }
}

#[test]
fn a_classifier_of_several_classes_is_refused_by_name() {
    let refused = |change: fn(&mut Value)| {
        let checkpoint = open_hugging_face("bert-pair", change, |_| {});
        Config::read(&checkpoint).unwrap_err().to_string()
    };
    let three = refused(|config| config["id2label"] = serde_json::json!({"0": "a", "1": "b", "2": "c"}));
    assert!(three.contains("a classifier of 3 classes with 2 kinds of token is not supported"), "{three}");
    let unsaid = refused(|config| drop(config.as_object_mut().unwrap().remove("id2label")));
    assert!(unsaid.contains("a classifier of 2 classes"), "{unsaid}");
    let one_kind = refused(|config| config["type_vocab_size"] = 1.into());
    assert!(one_kind.contains("with 1 kinds of token"), "{one_kind}");
}

#[test]
fn pooling_that_is_not_computed_is_refused_by_name() {
    let refused = |checkpoint: &Checkpoint| Config::read(checkpoint).unwrap_err().to_string();
    let ranks = open_gguf("bert", |bytes| set_u32(bytes, "bert.pooling_type", 4));
    assert!(refused(&ranks).contains("bert.pooling_type 4 is not supported"), "{}", refused(&ranks));
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
