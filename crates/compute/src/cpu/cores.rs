//! How many threads compute where nobody says it.
//!
//! As many as the process may use: its affinity, its container's quota, and of a machine with several memory nodes the
//! processors of one. A region of tens of microseconds is shared by all threads, and weights lie where one of them packed
//! them: a thread on another node waits for both across the machine, and the others wait for it.

use std::collections::BTreeSet;
use std::{fs, thread};

pub(super) fn threads_by_default() -> usize {
    let allowed = thread::available_parallelism().map_or(1, usize::from);
    largest_share().map_or(allowed, |share| allowed.min(share))
}

/// How many of this process's processors the node has that has most of them; `None` where the system does not tell.
fn largest_share() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let mine = processors(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?)?;
    let nodes = fs::read_dir("/sys/devices/system/node").ok()?.flatten().filter_map(|entry| {
        let name = entry.file_name();
        let number = name.to_str()?.strip_prefix("node")?;
        number.parse::<usize>().ok()?;
        processors(&fs::read_to_string(entry.path().join("cpulist")).ok()?)
    });
    share_of(&mine, nodes)
}

fn share_of(mine: &BTreeSet<usize>, nodes: impl Iterator<Item = BTreeSet<usize>>) -> Option<usize> {
    nodes.map(|node| node.intersection(mine).count()).max().filter(|&share| share > 0)
}

/// A list as the kernel writes it: `0-3,8,10-11`. A node without processors has an empty one.
fn processors(list: &str) -> Option<BTreeSet<usize>> {
    let mut all = BTreeSet::new();
    for range in list.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        all.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_lists_are_read() {
        let check = |list: &str, wanted: &[usize]| {
            assert_eq!(processors(list), Some(wanted.iter().copied().collect()), "{list:?}");
        };
        check("0-3,8,10-11\n", &[0, 1, 2, 3, 8, 10, 11]);
        check("\t5\n", &[5]);
        check("\n", &[]);
        assert_eq!(processors("0-x"), None);
        assert_eq!(processors("all"), None);
    }

    #[test]
    fn threads_are_those_of_one_node_that_the_process_may_use() {
        let check = |mine: &str, nodes: &[&str], wanted| {
            let nodes = nodes.iter().map(|list| processors(list).unwrap());
            assert_eq!(share_of(&processors(mine).unwrap(), nodes), wanted, "{mine} of {wanted:?}");
        };
        check("0-15", &["0-15"], Some(16));
        check("0-63", &["0-31", "32-63"], Some(32));
        check("0-3,32-63", &["0-31", "32-63"], Some(32));
        check("0-3,32", &["0-31", "32-63", ""], Some(4));
        // A node of memory alone, and processors that no node claims: nothing is learned.
        check("0-3", &[""], None);
        check("0-3", &[], None);
    }

    #[test]
    fn there_is_a_thread_at_least_and_no_more_than_allowed() {
        let allowed = thread::available_parallelism().unwrap().get();
        assert!((1..=allowed).contains(&threads_by_default()));
    }
}
