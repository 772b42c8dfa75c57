//! Files written by other programs are read as those programs say.
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::path::{Path, PathBuf};

use fornax_format::{Checkpoint, Error, Gguf, Safetensors, View};
use serde_json::Value;

fn valid(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/valid").join(name)
}

/// What the writers' own packages say of their files; made by make_files.py.
fn expected() -> Value {
    let text = std::fs::read(valid("expected.json")).expect("the file is committed");
    serde_json::from_slice(&text).expect("made as JSON")
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}

/// `views` are the tensors that expected.json lists for the file `name`, in any order.
fn check_tensors<'a>(name: &str, views: impl Iterator<Item = View<'a>>) {
    let expected = expected();
    let want = expected["tensors"][name].as_array().unwrap();
    let mut count = 0;
    for view in views {
        let line = want.iter().find(|line| line["name"] == view.name).unwrap();
        assert_eq!(view.dtype.name(), line["dtype"], "{name}: {view:?}");
        assert_eq!(serde_json::to_value(&view.shape).unwrap(), line["shape"], "{name}: {view:?}");
        assert_eq!(Value::from(crc32(view.bytes)), line["crc32"], "{name}: {view:?}");
        assert_eq!(view.values(), view.shape.iter().product::<usize>(), "{name}: {view:?}");
        count += 1;
    }
    assert_eq!(count, want.len(), "{name}");
}

#[test]
fn tensors_of_gguf_files_have_the_type_shape_and_bytes_that_were_written() {
    for name in ["metadata.gguf", "dtypes.gguf", "shapes.gguf", "base.gguf", "version2.gguf", "merged.gguf"] {
        let gguf = Gguf::open(&valid(name)).unwrap();
        check_tensors(name, gguf.tensors());
        assert_eq!(gguf.version(), if name == "version2.gguf" { 2 } else { 3 });
        assert_eq!(gguf.file_bytes(), std::fs::metadata(valid(name)).unwrap().len());
        assert_eq!(gguf.data_bytes(), gguf.tensors().map(|view| view.bytes.len() as u64).sum::<u64>());
    }
}

#[test]
fn metadata_of_every_type_is_read_as_written() {
    let gguf = Gguf::open(&valid("metadata.gguf")).unwrap();
    let expected = expected();
    let want = expected["metadata"].as_object().unwrap();
    for (key, value) in want {
        let got = gguf.metadata().get(key).unwrap_or_else(|| panic!("{key} is missing"));
        assert_eq!(&serde_json::to_value(got).unwrap(), value, "{key}");
    }
    let keys: Vec<_> = gguf.metadata().iter().map(|(key, _)| key).collect();
    let in_order: Vec<_> =
        ["general.architecture"].into_iter().chain(want.keys().map(String::as_str)).collect();
    assert_eq!(keys, in_order);
}

#[test]
fn the_first_shard_opens_the_whole_split() {
    let name = "split-00001-of-00003.gguf";
    let gguf = Gguf::open(&valid(name)).unwrap();
    check_tensors(name, gguf.tensors());
    assert_eq!(gguf.files().len(), 3);
    assert_eq!(gguf.metadata().u32("test.layers").unwrap(), 3);
    for layer in 0..3u8 {
        let view = gguf.tensor(&format!("blk.{layer}.weight")).unwrap();
        assert_eq!(view.bytes[..4], f32::from(layer).to_le_bytes());
    }
    assert!(gguf.tensor("blk.3.weight").is_none());
}

#[test]
fn a_file_beside_a_model_keeps_its_own_metadata_and_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let copy = |from: &str, to: &str| std::fs::copy(valid(from), folder.path().join(to)).unwrap();
    (1..=3).for_each(|number| {
        let name = format!("split-0000{number}-of-00003.gguf");
        copy(&name, &name);
    });
    copy("dtypes.gguf", "mmproj-model-F16.gguf");
    let Ok(Checkpoint::Gguf(gguf)) = Checkpoint::open(folder.path()) else {
        panic!("one model and one beside it")
    };
    assert_eq!((gguf.tensors().count(), gguf.files().len()), (3, 3));
    let [beside] = gguf.beside() else { panic!("{:?}", gguf.beside()) };
    check_tensors("dtypes.gguf", beside.tensors());
    assert!(gguf.tensor(beside.tensors().next().unwrap().name).is_none());
    assert!(beside.metadata().u32("test.layers").is_err());
}

#[test]
fn shards_from_memory_are_the_shards_from_disk() {
    let name = |number| format!("split-0000{number}-of-00003.gguf");
    let shards = (1..=3).map(|number| std::fs::read(valid(&name(number))).unwrap()).collect();
    let (memory, disk) = (Gguf::from_bytes(shards).unwrap(), Gguf::open(&valid(&name(1))).unwrap());
    assert!(memory.tensors().eq(disk.tensors()));
}

#[test]
fn another_shard_than_the_first_is_refused_and_the_first_is_named() {
    let error = Gguf::open(&valid("split-00002-of-00003.gguf")).unwrap_err();
    assert!(matches!(error.fault(), Error::NotFirstShard { number: 2, count: 3, .. }), "{error}");
    assert!(error.to_string().contains("split-00001-of-00003.gguf"), "{error}");
}

#[test]
fn tensors_of_a_safetensors_file_have_the_type_shape_and_bytes_that_were_written() {
    let file = Safetensors::open(&valid("single.safetensors")).unwrap();
    check_tensors("single.safetensors", file.tensors());
    assert_eq!(file.tensor("matrix").unwrap().shape, [2, 3]);
    assert_eq!(file.file_bytes(), std::fs::metadata(valid("single.safetensors")).unwrap().len());
    assert_eq!(file.data_bytes(), 4 + 48 + 5 + 2);
}

#[test]
fn a_hugging_face_directory_gives_its_documents_and_all_shards() {
    let Ok(Checkpoint::HuggingFace(model)) = Checkpoint::open(&valid("huggingface")) else {
        panic!("not a Hugging Face directory")
    };
    assert_eq!(model.config()["vocab_size"], 3);
    assert_eq!(model.generation_config().unwrap()["eos_token_id"][1], 2);
    assert_eq!(model.chat_template(), Some("in the configuration"));
    assert!(model.tokenizer_config().unwrap().is_object());
    assert_eq!(model.tokenizer_json(), Some(&*valid("huggingface/tokenizer.json")));
    assert_eq!(model.directory(), valid("huggingface"));
    assert_eq!(model.weights().files().len(), 2);
    for (name, file) in [("a", 0), ("b", 1)] {
        let view = model.weights().tensor(name).unwrap();
        assert_eq!((view.bytes, &*view.shape), (&[0, 0, 0, 0, 0, 0, 0x80, 0x3f][..], &[2][..]), "{file}");
    }
}

#[test]
fn released_pages_read_the_same_again() {
    // Larger than some pages, so that there is an inside to release.
    let values: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 7) as u8).collect();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("big.safetensors");
    let header = format!(r#"{{"a":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, values.len());
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &values].concat();
    std::fs::write(&path, file).unwrap();

    let opened = Safetensors::open(&path).unwrap();
    let view = opened.tensor("a").unwrap();
    assert_eq!(view.bytes, values);
    let resident = resident_kib(&path);
    view.release();
    let released = resident_kib(&path);
    assert!(resident >= 1024 && released <= 16, "{resident} KiB resident, {released} KiB after release");
    assert_eq!(view.bytes, values);
    view.rows(5..9).unwrap().release(); // less than a page: nothing to do
    assert_eq!(view.bytes, values);
}

/// KiB of the mapped file that are resident in this process.
fn resident_kib(path: &Path) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let of_file = maps.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
    let line = of_file.into_iter().find_map(|line| line.strip_prefix("Rss:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

#[test]
fn a_header_is_whole_from_its_last_byte_on() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/llama.gguf");
    let bytes = std::fs::read(path).unwrap();
    let gguf = fornax_format::Gguf::from_bytes(vec![bytes.clone()]).unwrap();
    // Its data is the last of the file, so what stands in front of it is known.
    let header = bytes.len() - usize::try_from(gguf.data_bytes()).unwrap();
    let has = |length: usize| fornax_format::Gguf::has_header(&bytes[..length]).unwrap();
    assert!(has(bytes.len()) && has(header));
    assert!([8, 100, header / 2, header - 64].into_iter().all(|length| !has(length)));
    assert!(fornax_format::Gguf::has_header(b"no such file").is_err());
}
