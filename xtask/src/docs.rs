//! The documentation as a whole: every page is in the table of contents, and every link leads somewhere.
//!
//! `docs` is the source of an mdBook (`docs/book.toml`), but is read where it lies as well, so that links are judged as files.

use std::collections::{BTreeSet, HashMap};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};

use crate::phases::Outcome;
use crate::{command, output, root};

const CONTENTS: &str = "docs/SUMMARY.md";

pub(crate) fn check() -> Result<Outcome> {
    let listed = output(&mut command(
        "git",
        &["ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
    ))?;
    let names = listed.split('\0').filter(|name| !name.is_empty() && root().join(name).is_file());
    let mut pages = HashMap::new();
    for name in names {
        let text = std::fs::read_to_string(root().join(name)).with_context(|| name.to_owned())?;
        pages.insert(PathBuf::from(name), text);
    }
    let offences = offences(&pages, |path| root().join(path).exists());
    for offence in &offences {
        println!("{offence}");
    }
    anyhow::ensure!(offences.is_empty(), "{} links or pages of the documentation are wrong", offences.len());
    Ok(Outcome::Passed)
}

fn offences(pages: &HashMap<PathBuf, String>, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut offences = Vec::new();
    let mut contents = BTreeSet::new();
    for (page, text) in pages {
        for (line, target) in links(text) {
            let mut offend =
                |what: &str| offences.push(format!("{}:{line}: {what}: {target}", page.display()));
            let (path, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let path = match path {
                "" => page.clone(),
                path => plain(&page.parent().unwrap_or(Path::new("")).join(path)),
            };
            if page == Path::new(CONTENTS) && !contents.insert(path.clone()) {
                offend("is listed twice");
            }
            if !exists(&path) {
                offend("leads nowhere");
            } else if !anchor.is_empty()
                && pages.get(&path).is_some_and(|text| !headings(text).contains(anchor))
            {
                offend("names no heading");
            }
        }
    }
    for page in pages.keys().filter(|page| page.starts_with("docs") && *page != Path::new(CONTENTS)) {
        if !contents.contains(page) {
            offences.push(format!("{CONTENTS} does not list {}", page.display()));
        }
    }
    offences.sort();
    offences
}

/// Without `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut plain, part| {
        match part {
            Component::ParentDir => {
                plain.pop();
            }
            Component::CurDir => {}
            part => plain.push(part),
        }
        plain
    })
}

/// Lines outside of blocks of code, with their numbers; what is code within a line is taken out.
fn prose(text: &str) -> impl Iterator<Item = (usize, String)> {
    let mut is_code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
            return None;
        }
        (!is_code).then(|| (index + 1, line.split('`').step_by(2).collect::<Vec<_>>().join("`")))
    })
}

/// Targets of links and pictures that are in this repository, by line.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
        let sources = line.split("src=\"").skip(1).filter_map(|rest| rest.split('"').next());
        let own = targets.chain(sources).filter(|target| !target.contains(':') && !target.is_empty());
        found.extend(own.map(|target| (number, target.to_owned())));
    }
    found
}

/// How headings are named in links, as GitHub and mdBook do it.
fn headings(text: &str) -> BTreeSet<String> {
    let mut is_code = false;
    let mut found = BTreeSet::new();
    let mut counts: HashMap<String, usize> = HashMap::new();
    for line in text.lines() {
        is_code ^= line.trim_start().starts_with("```");
        let Some(heading) = line.strip_prefix('#').filter(|_| !is_code) else { continue };
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let kept =
            heading.chars().filter(|letter| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_'));
        let name: String = kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect();
        let count = counts.entry(name.clone()).or_default();
        found.insert(if *count == 0 { name } else { format!("{name}-{count}") });
        *count += 1;
    }
    // Places that are named by hand.
    for rest in text.split("<a id=\"").skip(1) {
        found.extend(rest.split('"').next().map(str::to_owned));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_links_and_forgotten_pages_are_found() {
        let page = |name: &str, text: &str| (PathBuf::from(name), text.to_owned());
        let pages = HashMap::from([
            page(
                "README.md",
                "[a](docs/a.md#what-is-it) [b](docs/b.md) [c](https://example.org) `[x](y)`\n```\n[d](e)\n```",
            ),
            page("docs/a.md", "# What *is* it?\n[up](../README.md) [here](#nowhere)"),
            page("docs/c.md", ""),
            page("docs/SUMMARY.md", "[A](a.md)\n[A](a.md)"),
        ]);
        let found = offences(&pages, |path| pages.contains_key(path));
        assert_eq!(
            found,
            [
                "README.md:1: leads nowhere: docs/b.md",
                "docs/SUMMARY.md does not list docs/c.md",
                "docs/SUMMARY.md:2: is listed twice: a.md",
                "docs/a.md:2: names no heading: #nowhere",
            ]
        );
    }
}
