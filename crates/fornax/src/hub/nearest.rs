//! The names nearest to one that is not known.

use super::{Hub, catalog, shelf};

/// From this similarity on a name may be what was meant; names that share nothing have less.
const NEAR: f64 = 0.78;

/// Names that are told.
const TOLD: usize = 3;

/// `; nearest: qwen3-4b, qwen3-8b`, or nothing. What `hub` has on disk is known, too.
pub fn words(name: &str, hub: Option<&Hub>) -> String {
    let catalog =
        catalog::offers().flat_map(|entry| std::iter::once(entry.name).chain(entry.aliases.iter().copied()));
    let shelf = shelf::KNOWN
        .iter()
        .flat_map(|known| std::iter::once(known.name).chain(known.aliases.iter().copied()));
    let on_disk = hub.map(Hub::locals).unwrap_or_default();
    let on_disk = on_disk.into_iter().map(|(reference, _)| reference.to_string());
    let names: Vec<String> = catalog.chain(shelf).map(str::to_owned).chain(on_disk).collect();
    match nearest(name, &names) {
        found if found.is_empty() => String::new(),
        found => format!("; nearest: {}", found.join(", ")),
    }
}

/// The names most like `name`, the best first.
fn nearest<'n>(name: &str, names: &'n [String]) -> Vec<&'n str> {
    let name = name.to_lowercase();
    let mut scored: Vec<(f64, &str)> = names
        .iter()
        .map(|known| {
            // A repository is also known by its own name.
            let own = known.rsplit('/').next().unwrap_or(known).to_lowercase();
            (strsim::jaro_winkler(&name, &own), known.as_str())
        })
        .filter(|(score, _)| *score >= NEAR)
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    scored.into_iter().take(TOLD).map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_probably_meant_comes_first_and_nothing_far_is_told() {
        let names = ["smollm2", "qwen3-4b", "mistral-7b", "owner/Qwen2.5-0.5B-GGUF"].map(str::to_owned);
        let check = |name: &str, first: Option<&str>| {
            assert_eq!(nearest(name, &names).first().copied(), first, "{name}")
        };
        check("smolm2", Some("smollm2"));
        check("mistrall", Some("mistral-7b"));
        check("Qwen3:4b", Some("qwen3-4b"));
        check("qwen2.5-0.5b", Some("owner/Qwen2.5-0.5B-GGUF"));
        check("frobnicate", None);
    }
}
