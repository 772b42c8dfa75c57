//! Which files of a repository make the model that is meant. Nothing here knows where the files are: the same rules
//! choose among those that the hub lists and those that are on disk.

use super::reference::{Want, is_model_file};

/// The files of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// In the order in which they are fetched: what is small and says how to read the rest, then the weights. So a
    /// model whose weights are all there is complete.
    pub(super) files: Vec<String>,
    pub(super) entry: Entry,
}

/// What is opened to load the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// This file of [`Choice::files`].
    File(String),
    /// The folder they are in.
    Folder,
    /// The folder, with further files that this index of shards names.
    Indexed(String),
}

/// Why no model could be chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Undecided {
    /// No file is called that.
    NoFile { file: String },
    /// None in that quantisation; these there are.
    NoQuant { quant: String, there: Vec<String> },
    /// Several that differ in more than their quantisation.
    Several { there: Vec<String> },
    /// A split model that lacks some of its shards.
    Shards { first: String, there: usize, wanted: usize },
    /// No weights that can be read, or not what they need.
    Nothing { lacks: &'static str },
}

pub(super) const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// What is read of a folder beside its weights; the last are how a sentence encoder pools, and what
/// stands behind.
const BESIDE: [&str; 13] = [
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "modules.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "3_Dense/config.json",
    "3_Dense/model.safetensors",
];

/// Quantisations from the one that suits most machines on: about four bits lose little, more bits cost memory and
/// speed, fewer cost answers.
const PREFERRED: [&str; 27] = [
    "Q4_K_M", "Q4_K_S", "Q4_K_L", "Q4_K_XL", "Q4_K", "MXFP4", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_1", "Q5_K_M",
    "Q5_K_S", "Q5_K_L", "Q5_K_XL", "Q5_K", "Q5_0", "Q5_1", "Q6_K", "Q6_K_L", "Q8_0", "Q3_K_L", "Q3_K_M",
    "IQ3_M", "Q3_K_S", "BF16", "F16", "F32",
];

/// Chooses among `names`, which are all files of a repository. A model in GGUF comes with what reads its images.
pub(super) fn choose(names: &[String], want: &Want) -> Result<Choice, Undecided> {
    let mut choice = choose_model(names, want)?;
    if let Entry::File(model) = &choice.entry
        && let Some(projector) = projector(names, model)
    {
        choice.files.insert(0, projector.to_owned());
    }
    Ok(choice)
}

/// Of files in GGUF the one that reads images for a model, if one of them is its own: one that is called as the model
/// is, or as a part of that, or one without a name of its own in the folder of a single model. Of several that differ
/// in their type alone, the first of the usual ones.
pub(crate) fn projector<'n>(names: &'n [String], model: &str) -> Option<&'n str> {
    if !is_gguf_model(model) {
        return None;
    }
    let parts = |name: &'n str| name.rsplit_once('/').unwrap_or(("", name));
    let (folder, own) = model.rsplit_once('/').unwrap_or(("", model));
    let own = plain_name(split(own).map_or(own, |shard| shard.stem));
    let there = || names.iter().map(|name| parts(name)).filter(|(other, _)| *other == folder);
    let is_alone = there()
        .filter(|(_, name)| is_gguf_model(name))
        .all(|(_, name)| plain_name(split(name).map_or(name, |shard| shard.stem)) == own);
    let mut found = Vec::new();
    for name in names.iter().filter(|name| parts(name).0 == folder && is_projector(name)) {
        let called = plain_name(parts(name).1);
        let fits = if called.is_empty() { is_alone } else { own.contains(&called) };
        let quant = quant_of(name);
        let usual = ["F16", "BF16", "Q8_0", "F32"];
        let rank = usual.iter().position(|usual| quant.as_deref().is_some_and(|quant| same(quant, usual)));
        if fits {
            found.push((own.len() - called.len(), rank.unwrap_or(usual.len()), name.as_str()));
        }
    }
    // The nearest name first.
    found.into_iter().min().map(|(.., name)| name)
}

/// What a file's name says of the model alone, in small letters and digits: neither its type nor that it is a
/// projector.
fn plain_name(name: &str) -> String {
    let mut name = name.strip_suffix(".gguf").unwrap_or(name).to_ascii_lowercase();
    if let Some(quant) = quant_of(&name) {
        name = name.replace(&quant.to_ascii_lowercase(), "");
    }
    for word in ["mmproj", "model"] {
        name = name.replace(word, "");
    }
    name.retain(|c| c.is_ascii_alphanumeric());
    name
}

fn choose_model(names: &[String], want: &Want) -> Result<Choice, Undecided> {
    let models = gguf_models(names);
    match want {
        Want::File(file) => {
            let found = found(names, file).ok_or_else(|| Undecided::NoFile { file: file.clone() })?;
            if found.to_ascii_lowercase().ends_with(".gguf") {
                let key = split(found).map_or(found, |shard| shard.stem);
                let model = models.into_iter().find(|model| model.key == key);
                return model.ok_or_else(|| Undecided::NoFile { file: file.clone() })?.choice();
            }
            let mut files = beside(names)?;
            files.push(found.to_owned());
            Ok(Choice { files, entry: Entry::File(found.to_owned()) })
        }
        Want::Quant(quant) => {
            let called = |model: &Model| model.quant.as_deref().is_some_and(|own| same(own, quant));
            let there = || models.iter().map(Model::label).collect();
            let mut called: Vec<&Model> = models.iter().filter(|model| called(model)).collect();
            match (called.pop(), called.is_empty()) {
                (Some(model), true) => model.choice(),
                (Some(model), false) => {
                    called.push(model);
                    Err(Undecided::Several {
                        there: called.iter().map(|model| model.files[0].clone()).collect(),
                    })
                }
                (None, _) => Err(Undecided::NoQuant { quant: quant.clone(), there: there() }),
            }
        }
        Want::Any => {
            if let [model] = &models[..]
                && !names.iter().any(|name| is_folder_weight(name))
            {
                return model.choice();
            }
            for quant in PREFERRED {
                let mut called =
                    models.iter().filter(|m| m.quant.as_deref().is_some_and(|own| same(own, quant)));
                // Sixteen bits in both containers are the same numbers: the folder is the original.
                let is_whole = matches!(quant, "BF16" | "F16" | "F32");
                match (called.next(), called.next()) {
                    (Some(_), _) if is_whole && folder(names).is_ok() => break,
                    (Some(model), None) => return model.choice(),
                    (Some(_), Some(_)) => {
                        return Err(Undecided::Several {
                            there: models.iter().map(|model| model.files[0].clone()).collect(),
                        });
                    }
                    (None, _) => {}
                }
            }
            if models.is_empty() || names.iter().any(|name| is_folder_weight(name)) {
                return folder(names);
            }
            Err(Undecided::Several { there: models.iter().map(|model| model.files[0].clone()).collect() })
        }
    }
}

fn is_folder_weight(name: &str) -> bool {
    name == SINGLE || name == INDEX
}

/// A folder of safetensors.
fn folder(names: &[String]) -> Result<Choice, Undecided> {
    let has = |wanted: &str| names.iter().any(|name| name == wanted);
    let mut files = beside(names)?;
    if has(INDEX) {
        files.push(INDEX.to_owned());
        Ok(Choice { files, entry: Entry::Indexed(INDEX.to_owned()) })
    } else if has(SINGLE) {
        files.push(SINGLE.to_owned());
        Ok(Choice { files, entry: Entry::Folder })
    } else {
        Err(Undecided::Nothing { lacks: "model.safetensors and no .gguf file" })
    }
}

/// What stands beside the weights of a folder. What cannot do without is missed before gigabytes are fetched.
fn beside(names: &[String]) -> Result<Vec<String>, Undecided> {
    for lacks in ["config.json", "tokenizer.json"] {
        if !names.iter().any(|name| name == lacks) && names.iter().any(|name| is_model_file(name)) {
            return Err(Undecided::Nothing { lacks });
        }
    }
    Ok(BESIDE
        .iter()
        .filter(|wanted| names.iter().any(|name| name == *wanted))
        .map(|&name| name.into())
        .collect())
}

/// The file of this name, or the only one whose last part it is.
fn found<'n>(names: &'n [String], file: &str) -> Option<&'n str> {
    if let Some(name) = names.iter().find(|name| *name == file) {
        return Some(name);
    }
    let mut ends = names.iter().filter(|name| name.rsplit('/').next() == Some(file));
    ends.next().filter(|_| ends.next().is_none()).map(String::as_str)
}

/// A GGUF model: one file, or all shards of one.
#[derive(Debug)]
struct Model {
    /// The file's name, or what the names of its shards begin with.
    key: String,
    files: Vec<String>,
    /// How many shards their names promise.
    wanted: usize,
    quant: Option<String>,
}

impl Model {
    fn choice(&self) -> Result<Choice, Undecided> {
        let first = &self.files[0];
        if self.files.len() != self.wanted {
            return Err(Undecided::Shards {
                first: first.clone(),
                there: self.files.len(),
                wanted: self.wanted,
            });
        }
        Ok(Choice { files: self.files.clone(), entry: Entry::File(first.clone()) })
    }

    fn label(&self) -> String {
        self.quant.clone().unwrap_or_else(|| self.files[0].clone())
    }
}

fn gguf_models(names: &[String]) -> Vec<Model> {
    let mut models: Vec<Model> = Vec::new();
    let mut sorted: Vec<&String> = names.iter().filter(|name| is_gguf_model(name)).collect();
    sorted.sort();
    for name in sorted {
        let (key, wanted) = match split(name) {
            Some(shard) => (shard.stem.to_owned(), shard.count),
            None => (name.clone(), 1),
        };
        match models.iter_mut().find(|model| model.key == key && model.wanted == wanted) {
            Some(model) => model.files.push(name.clone()),
            None => models.push(Model { quant: quant_of(&key), key, files: vec![name.clone()], wanted }),
        }
    }
    models
}

/// Projectors of images and matrices of importance are GGUF files too, and no language models.
fn is_gguf_model(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    lower.ends_with(".gguf") && !lower.contains("mmproj") && !lower.contains("imatrix")
}

/// What reads images for a model beside it.
fn is_projector(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    lower.ends_with(".gguf") && lower.contains("mmproj")
}

struct Shard<'n> {
    /// What stands before the numbers.
    stem: &'n str,
    count: usize,
}

/// `NAME-00001-of-00003.gguf`.
fn split(name: &str) -> Option<Shard<'_>> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits(number) && digits(count)).then_some(())?;
    Some(Shard { stem, count: count.parse().ok()? })
}

/// The quantisation that a file's name tells: the last word that looks like one.
fn quant_of(name: &str) -> Option<String> {
    let name = name.strip_suffix(".gguf").unwrap_or(name).to_ascii_uppercase();
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let starts = name.char_indices().filter(|&(at, c)| {
        let before = name[..at].chars().next_back();
        c.is_ascii_alphanumeric() && !before.is_some_and(|before| before.is_ascii_alphanumeric())
    });
    let mut words = starts.map(|(at, _)| {
        let rest = &name[at..];
        &rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())]
    });
    words.rfind(|word| is_quant(word)).map(str::to_owned)
}

fn is_quant(word: &str) -> bool {
    let numbered = ["IQ", "TQ", "Q"].iter().find_map(|prefix| word.strip_prefix(prefix));
    numbered.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        || matches!(word, "F16" | "FP16" | "BF16" | "F32" | "FP32" | "NVFP4")
        || word.starts_with("MXFP4")
}

fn same(own: &str, wanted: &str) -> bool {
    let plain = |quant: &str| quant.to_ascii_uppercase().replace("FP16", "F16").replace("FP32", "F32");
    let (own, wanted) = (plain(own), plain(wanted));
    own == wanted || (wanted == "MXFP4" && own.starts_with("MXFP4"))
}

/// The weights that an index of shards names, each once, in order.
pub(super) fn shards(index: &serde_json::Value) -> Option<Vec<String>> {
    let map = index.get("weight_map")?.as_object()?;
    let mut names: Vec<String> =
        map.values().map(|name| name.as_str().map(str::to_owned)).collect::<Option<_>>()?;
    names.sort();
    names.dedup();
    Some(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    const ORIGINAL: [&str; 6] = [
        "README.md",
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "pytorch_model.bin",
        "onnx/m.onnx",
    ];

    fn files(there: &[&str], want: &Want) -> Vec<String> {
        choose(&names(there), want).unwrap_or_else(|why| panic!("{there:?}: {why:?}")).files
    }

    #[test]
    fn the_quantisation_is_the_last_word_that_looks_like_one() {
        for (name, quant) in [
            ("m-Q4_K_M.gguf", Some("Q4_K_M")),
            ("llama-2-7b.Q5_0.gguf", Some("Q5_0")),
            ("model_q8_0.gguf", Some("Q8_0")),
            ("Qwen3-8B-UD-IQ1_S.gguf", Some("IQ1_S")),
            ("gpt-oss-20b-mxfp4.gguf", Some("MXFP4")),
            ("BF16/m-BF16", Some("BF16")),
            ("tq1_0.gguf", Some("TQ1_0")),
            ("Q4_K_M/model.gguf", Some("Q4_K_M")),
            ("Qwen2.gguf", None),
            ("phi-3-mini.gguf", None),
        ] {
            assert_eq!(quant_of(name).as_deref(), quant, "{name}");
        }
    }

    #[test]
    fn four_bits_are_chosen_where_none_are_asked_for() {
        let check =
            |there: &[&str], wanted: &str| assert_eq!(files(there, &Want::Any), [wanted], "{there:?}");
        check(&["a-Q2_K.gguf", "a-Q4_K_S.gguf", "a-Q4_K_M.gguf", "a-Q8_0.gguf"], "a-Q4_K_M.gguf");
        check(&["a.Q8_0.gguf", "a.Q5_K_M.gguf", "a.F16.gguf"], "a.Q5_K_M.gguf");
        check(&["strange.gguf", "README.md"], "strange.gguf");
        check(&["a-Q8_0.gguf", "a.imatrix.gguf"], "a-Q8_0.gguf");
        check(&["config.json", "tokenizer.json", "model.safetensors", "a-q4_0.gguf"], "a-q4_0.gguf");
    }

    #[test]
    fn what_reads_images_comes_with_its_model_and_with_no_other() {
        let check = |there: &[&str], wanted: &[&str]| {
            let mut wanted = names(wanted);
            wanted.push(there[0].to_owned());
            let chosen = files(there, &Want::File(there[0].to_owned()));
            assert_eq!(chosen, wanted, "{there:?}");
        };
        check(&["gemma-3-4b-it-Q4_K_M.gguf", "mmproj-model-f16.gguf"], &["mmproj-model-f16.gguf"]);
        check(
            &["a-Q8_0.gguf", "mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"],
            &["mmproj-F16.gguf"],
        );
        let own = "mmproj-Qwen3-VL-2B-Instruct-F16.gguf";
        check(&["Qwen3-VL-2B-Instruct-Q4_K_M.gguf", own, "mmproj-gemma-3-4b-it.gguf"], &[own]);
        check(
            &["Qwen3-VL-2B-Instruct-Q4_K_M.gguf", "qwen3-vl-2b-instruct.mmproj-q8_0.gguf"],
            &["qwen3-vl-2b-instruct.mmproj-q8_0.gguf"],
        );
        // Of which model it is nobody says.
        check(&["one-Q4_0.gguf", "other-Q4_0.gguf", "mmproj-f16.gguf"], &[]);
        check(&["one-Q4_0.gguf", "one-Q8_0.gguf", "mmproj-f16.gguf"], &["mmproj-f16.gguf"]);
        check(&["one-Q4_0.gguf", "mmproj-other-f16.gguf", "old/mmproj-one-f16.gguf"], &[]);
        assert_eq!(
            files(&["a-Q8_0.gguf", "mmproj-a-f16.gguf"], &Want::Any),
            ["mmproj-a-f16.gguf", "a-Q8_0.gguf"]
        );
        let split = ["q/b-00001-of-00002.gguf", "q/b-00002-of-00002.gguf", "q/mmproj-b.gguf"];
        assert_eq!(files(&split, &Want::Any), [split[2], split[0], split[1]]);
    }

    #[test]
    fn a_quantisation_is_matched_whole_and_in_any_letters() {
        let quant = |name: &str| Want::Quant(name.to_owned());
        let there = ["a-Q4_K_M.gguf", "a-Q4_K.gguf", "a-f16.gguf"];
        assert_eq!(files(&there, &quant("q4_k")), ["a-Q4_K.gguf"]);
        assert_eq!(files(&there, &quant("FP16")), ["a-f16.gguf"]);
        let missing = choose(&names(&there), &quant("Q8_0")).unwrap_err();
        let listed = names(&["F16", "Q4_K", "Q4_K_M"]);
        assert!(
            matches!(&missing, Undecided::NoQuant { there, .. } if { let mut t = there.clone(); t.sort(); t == listed }),
            "{missing:?}"
        );
    }

    #[test]
    fn a_split_model_is_fetched_whole_whichever_shard_is_named() {
        let there = ["q/a-Q4_K_M-00002-of-00002.gguf", "q/a-Q4_K_M-00001-of-00002.gguf", "a-Q8_0.gguf"];
        let both = ["q/a-Q4_K_M-00001-of-00002.gguf", "q/a-Q4_K_M-00002-of-00002.gguf"];
        for want in [
            Want::Any,
            Want::Quant("Q4_K_M".into()),
            Want::File(both[1].into()),
            Want::File("a-Q4_K_M-00002-of-00002.gguf".into()),
        ] {
            let choice = choose(&names(&there), &want).unwrap();
            assert_eq!(choice.files, both, "{want:?}");
            assert_eq!(choice.entry, Entry::File(both[0].into()));
        }
        let lacking = choose(&names(&there[1..]), &Want::Any).unwrap_err();
        assert_eq!(lacking, Undecided::Shards { first: both[0].into(), there: 1, wanted: 2 });
    }

    #[test]
    fn a_folder_is_what_is_read_of_it_and_nothing_else() {
        assert_eq!(files(&ORIGINAL, &Want::Any), ["config.json", "tokenizer.json", "model.safetensors"]);
        let mut sharded = ORIGINAL.to_vec();
        sharded[3] = INDEX;
        let choice = choose(&names(&sharded), &Want::Any).unwrap();
        assert_eq!(choice.entry, Entry::Indexed(INDEX.into()));
        let mut beside_gguf = ORIGINAL.to_vec();
        beside_gguf.push("model-F16.gguf");
        assert_eq!(files(&beside_gguf, &Want::Any).last().map(String::as_str), Some("model.safetensors"));
    }

    #[test]
    fn what_cannot_be_decided_is_not_guessed() {
        let check = |there: &[&str], want: Want, wanted: Undecided| {
            assert_eq!(choose(&names(there), &want), Err(wanted), "{there:?}");
        };
        let several = ["small-Q4_K_M.gguf", "large-Q4_K_M.gguf"];
        let both = names(&["large-Q4_K_M.gguf", "small-Q4_K_M.gguf"]);
        check(&several, Want::Any, Undecided::Several { there: both.clone() });
        check(&several, Want::Quant("Q4_K_M".into()), Undecided::Several { there: both });
        check(&["a.gguf", "b.gguf"], Want::Any, Undecided::Several { there: names(&["a.gguf", "b.gguf"]) });
        check(&["README.md"], Want::Any, Undecided::Nothing { lacks: "model.safetensors and no .gguf file" });
        check(
            &["config.json", "model.safetensors"],
            Want::Any,
            Undecided::Nothing { lacks: "tokenizer.json" },
        );
        check(
            &["tokenizer.json", "model.safetensors"],
            Want::Any,
            Undecided::Nothing { lacks: "config.json" },
        );
        check(&["a.gguf"], Want::File("b.gguf".into()), Undecided::NoFile { file: "b.gguf".into() });
        let twice = ["x/a.gguf", "y/a.gguf"];
        check(&twice, Want::File("a.gguf".into()), Undecided::NoFile { file: "a.gguf".into() });
    }

    #[test]
    fn an_index_names_each_shard_once() {
        let index = serde_json::json!({"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}});
        assert_eq!(shards(&index), Some(names(&["1.safetensors", "2.safetensors"])));
        for wrong in [serde_json::json!({}), serde_json::json!({"weight_map": {"a": 1}})] {
            assert_eq!(shards(&wrong), None);
        }
    }
}
