//! What a `tokenizer.json` must not ask for, looked at before the `tokenizers` crate believes it.
//!
//! The crate trusts the file: an id becomes the length of a list, a merge whose token is missing panics, a normaliser
//! may multiply every text. A file from a stranger must end in an error instead.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;

/// Bytes of a file. Vocabularies of a quarter of a million tokens take some tens of MB.
const BYTES_MAX: usize = 256 << 20;

/// The largest id. Everything up to it gets a place in a list, whether a token has it or not. The
/// largest vocabularies that we know have some 262,144 tokens.
const ID_MAX: u64 = (1 << 22) - 1;

/// Bytes of all tokens together, which become nodes of a tree. A quarter of a million tokens have some two million.
const TOKEN_BYTES_MAX: usize = 16 << 20;

/// How many bytes the normalisers may make of one. A space that becomes `▁` makes three.
const GROWTH_MAX: usize = 16;

/// The file as JSON, if nothing in it asks for too much.
pub(crate) fn check(bytes: &[u8]) -> Result<(), String> {
    if bytes.len() > BYTES_MAX {
        return Err(format!("{} bytes, and at most {BYTES_MAX} are read", bytes.len()));
    }
    let file: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    ids(&file)?;
    merges(&file["model"])?;
    let growth = growth(&file["normalizer"])?;
    if growth > GROWTH_MAX {
        return Err(format!(
            "the normalizer makes up to {growth} bytes of one, and at most {GROWTH_MAX} are allowed"
        ));
    }
    Ok(())
}

fn ids(file: &Value) -> Result<(), String> {
    let vocab = file["model"]["vocab"].as_object().into_iter().flatten();
    let added = file["added_tokens"].as_array().into_iter().flatten();
    let named = vocab.map(|(token, id)| (token.as_str(), id));
    let added = added.map(|token| (token["content"].as_str().unwrap_or_default(), &token["id"]));
    // A Unigram's are a list, and each one's place is its id.
    let listed = file["model"]["vocab"].as_array().into_iter().flatten();
    let listed = listed.filter_map(|entry| Some((entry[0].as_str()?, &Value::Null)));
    let mut bytes = 0;
    for (token, id) in named.chain(added).chain(listed) {
        bytes += token.len();
        if bytes > TOKEN_BYTES_MAX {
            return Err(format!("its tokens have more than {TOKEN_BYTES_MAX} bytes together"));
        }
        if id.as_u64().is_some_and(|id| id > ID_MAX) {
            return Err(format!("token {token:?} has the id {id}, and ids go up to {ID_MAX}"));
        }
    }
    Ok(())
}

/// A merge is two tokens whose join is a token.
fn merges(model: &Value) -> Result<(), String> {
    let (Some(merges), Some(vocab)) = (model["merges"].as_array(), model["vocab"].as_object()) else {
        return Ok(());
    };
    let prefix = model["continuing_subword_prefix"].as_str().unwrap_or_default();
    for (index, merge) in merges.iter().enumerate() {
        let parts = match (merge.as_str(), merge.as_array().map(Vec::as_slice)) {
            (Some(line), _) => line.split_once(' '),
            (_, Some([left, right])) => left.as_str().zip(right.as_str()),
            _ => None,
        };
        // Lines of another form are the crate's to refuse: it says so, and does not panic.
        let Some((left, right)) = parts else { continue };
        let joined = [left, right.strip_prefix(prefix).unwrap_or(right)].concat();
        if let Some(missing) = [left, right, &joined].into_iter().find(|token| !vocab.contains_key(*token)) {
            return Err(format!("merge {index} needs the token {missing:?}, which is not in the vocabulary"));
        }
    }
    Ok(())
}

/// The most bytes that a normaliser makes of one byte, as far as that follows from what it says.
fn growth(normalizer: &Value) -> Result<usize, String> {
    match normalizer["type"].as_str() {
        Some("Sequence") => {
            let parts = normalizer["normalizers"].as_array().into_iter().flatten();
            parts.map(growth).try_fold(1, |all: usize, part| Ok(all.saturating_mul(part?)))
        }
        Some("Replace") => {
            let content = normalizer["content"].as_str().map_or(0, str::len);
            let replaced = match normalizer["pattern"]["String"].as_str() {
                Some(pattern) => content.div_ceil(pattern.len().max(1)),
                // A pattern may match the empty text between any two bytes.
                None => content + 1,
            };
            Ok(replaced.max(1))
        }
        Some("Precompiled") => {
            charsmap(normalizer["precompiled_charsmap"].as_str().unwrap_or_default())?;
            Ok(1)
        }
        _ => Ok(1),
    }
}

/// A map of characters is the length of its trie, the trie, and the texts that the trie's leaves point into. The crate
/// that follows it believes all of it: it takes memory for the length first, and looks wherever a unit points. So every
/// unit that some text leads to is followed here, and whatever it points to must exist.
fn charsmap(encoded: &str) -> Result<(), String> {
    let wrong = |what: &str| Err(format!("the normalizer's precompiled_charsmap {what}"));
    let Ok(map) = BASE64_STANDARD.decode(encoded) else {
        return wrong("is not base64");
    };
    let Some((length, rest)) = map.split_first_chunk::<4>() else {
        return wrong("is too short to hold its length");
    };
    let trie_bytes = u32::from_le_bytes(*length) as usize;
    if trie_bytes == 0 || !trie_bytes.is_multiple_of(4) || trie_bytes > rest.len() {
        return wrong(&format!("says that its first part has {trie_bytes} bytes, of {} in all", map.len()));
    }
    let (trie, texts) = rest.split_at(trie_bytes);
    let (units, _) = trie.as_chunks::<4>();
    let unit = |at: usize| units.get(at).map(|unit| u32::from_le_bytes(*unit) as usize);
    let Ok(texts) = std::str::from_utf8(texts) else {
        return wrong("has texts that are not UTF-8");
    };
    // Where a unit's children begin: each of them stands at that place with its byte flipped into it.
    let children = |at: usize, unit: usize| at ^ ((unit >> 10) << ((unit & (1 << 9)) >> 6));
    let mut seen = vec![false; units.len()];
    // With the number of bytes that lead there.
    let mut waiting = vec![(children(0, unit(0).unwrap_or_default()), 1)];
    while let Some((begin, depth)) = waiting.pop() {
        for byte in 1..=usize::from(u8::MAX) {
            let at = begin ^ byte;
            let Some(unit) = unit(at) else {
                return wrong(&format!("points to unit {at} of {}", units.len()));
            };
            // A unit that belongs to another byte ends the search there.
            if unit & ((1 << 31) | 0xff) != byte || std::mem::replace(&mut seen[at], true) {
                continue;
            }
            let next = children(at, unit);
            if unit & (1 << 8) != 0 {
                let Some(leaf) = units.get(next).map(|leaf| u32::from_le_bytes(*leaf) as usize) else {
                    return wrong(&format!("points to unit {next} of {}", units.len()));
                };
                let text = leaf & ((1 << 31) - 1);
                let Some(text) = texts.get(text..) else {
                    return wrong(&format!("points to byte {text} of {} bytes of texts", texts.len()));
                };
                let bytes = text.find('\0').unwrap_or(text.len());
                if bytes > GROWTH_MAX * depth {
                    return wrong(&format!("makes {bytes} bytes of {depth}"));
                }
            }
            waiting.push((next, depth + 1));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(file: &Value, wanted: &str) {
        let said = check(file.to_string().as_bytes()).expect_err(wanted);
        assert!(said.contains(wanted), "{said}");
    }

    fn taken(file: &Value) {
        check(file.to_string().as_bytes()).expect("nothing in it asks for too much");
    }

    #[test]
    fn an_id_that_would_take_all_memory_is_refused() {
        refused(&json!({"model": {"vocab": {"a": 0, "b": 4_294_967_295_u64}}}), "the id 4294967295");
        refused(
            &json!({"added_tokens": [{"id": 1 << 30, "content": "<x>"}]}),
            "\"<x>\" has the id 1073741824",
        );
        taken(&json!({"model": {"vocab": {"a": 0, "b": 262_143}}}));
    }

    #[test]
    fn tokens_that_would_make_a_tree_of_gigabytes_are_refused() {
        let long = "a".repeat(TOKEN_BYTES_MAX / 2 + 1);
        let other = format!("b{long}");
        refused(&json!({"model": {"vocab": [[long, 0.0], [other, -1.0]]}}), "bytes together");
        refused(
            &json!({"added_tokens": [{"id": 0, "content": long}, {"id": 1, "content": other}]}),
            "bytes together",
        );
        taken(&json!({"model": {"vocab": [[long, 0.0]]}}));
    }

    #[test]
    fn a_merge_without_its_tokens_is_refused() {
        let model = |merges: Value| json!({"model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": merges}});
        taken(&model(json!(["a b"])));
        taken(&model(json!([["a", "b"]])));
        refused(&model(json!(["b a"])), "\"ba\"");
        refused(&model(json!([["a", "b"], ["x", "b"]])), "merge 1 needs the token \"x\"");
    }

    #[test]
    fn normalizers_that_multiply_are_refused() {
        let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let all = |parts: Vec<Value>| json!({"normalizer": {"type": "Sequence", "normalizers": parts}});
        taken(&all(vec![json!({"type": "Prepend", "prepend": "▁"}), replace(json!({"String": " "}), "▁")]));
        taken(&all(vec![replace(json!({"Regex": " {2,}"}), "▁"), replace(json!({"String": "``"}), "\"")]));
        refused(&all(vec![replace(json!({"String": "a"}), &"a".repeat(100))]), "100 bytes of one");
        refused(&all(vec![replace(json!({"String": "a"}), "aaa"); 3]), "27 bytes of one");
        refused(&all(vec![replace(json!({"Regex": ""}), &"a".repeat(20))]), "21 bytes of one");
    }

    #[test]
    fn a_map_of_characters_that_lies_about_its_length_is_refused() {
        // 00 00 00 80 and two more bytes: two gigabytes announced.
        refused(&file("AAAAgAAA"), "2147483648 bytes, of 6");
        refused(&file("////////"), "4294967295 bytes");
        refused(&file("AAA="), "too short");
        refused(&file("!!!!!!!!"), "not base64");
    }

    fn file(charsmap: &str) -> Value {
        json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap}})
    }

    /// A map of 256 units in which "a" becomes a text: what the unit of "a" and its leaf are, and all texts.
    fn map_of_a(unit: u32, leaf: u32, texts: &str) -> Value {
        let mut units = [0u32; 256];
        units[usize::from(b'a')] = unit;
        units[usize::from(b'a') ^ 1] = leaf;
        let units = units.iter().flat_map(|unit| unit.to_le_bytes());
        let map: Vec<u8> = 1024u32.to_le_bytes().into_iter().chain(units).chain(texts.bytes()).collect();
        file(&BASE64_STANDARD.encode(map))
    }

    #[test]
    fn a_map_of_characters_that_points_beyond_itself_is_refused() {
        // Its byte, that a leaf belongs to it, and that its children begin one unit from it.
        let unit = u32::from(b'a') | 1 << 8 | 1 << 10;
        taken(&map_of_a(unit, 0, "b"));
        taken(&map_of_a(unit, 2, "é\0b"));
        refused(&map_of_a(unit, 1, "é"), "points to byte 1 of 2");
        refused(&map_of_a(unit, 9, "b"), "points to byte 9 of 1");
        refused(&map_of_a(unit, 0, &"b".repeat(17)), "makes 17 bytes of 1");
        refused(&map_of_a(u32::from(b'a') | 1 << 8 | 1 << 20, 0, "b"), "points to unit 1121 of 256");
        // A trie of one unit, which every other byte is beside.
        refused(&file("BAAAAAAAAABh"), "of 1");
    }
}
