//! How many threads compute where nobody says it, and on which processors.
//!
//! As many as the process may use: its affinity, its container's quota, and of a machine with several memory nodes the
//! processors of one. A region of tens of microseconds is shared by all threads, and weights lie where one of them
//! packed them: a thread on another node waits for both across the machine, and the others wait for it. So threads that
//! fit one node are bound to one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::{fs, thread};

/// Processors by their numbers.
pub(super) type Processors = BTreeSet<usize>;

/// Where the kernel lists memory nodes.
const NODES: &str = "/sys/devices/system/node";

pub(super) fn threads_by_default() -> usize {
    let allowed = thread::available_parallelism().map_or(1, usize::from);
    let largest = shares(Path::new(NODES)).and_then(|shares| shares.values().map(Processors::len).max());
    largest.map_or(allowed, |largest| allowed.min(largest))
}

/// The processors of one node for this many threads; `None` where there is nothing to choose: the process has those of
/// one node only, or no node has enough, or the system does not tell.
pub(super) fn node_for(threads: usize) -> Option<Processors> {
    one_of(shares(Path::new(NODES))?, threads, current())
}

/// The node where this thread runs, whose memory it may have filled, if that has enough; else the largest.
fn one_of(shares: BTreeMap<usize, Processors>, threads: usize, current: Option<usize>) -> Option<Processors> {
    if shares.len() < 2 {
        return None;
    }
    let here = |node: &Processors| current.is_some_and(|processor| node.contains(&processor));
    let enough = shares.into_values().filter(|node| node.len() >= threads);
    enough.reduce(|best, node| {
        let better = (here(&node), node.len()) > (here(&best), best.len());
        if better { node } else { best }
    })
}

/// Keeps the calling thread to some processors, and those that it starts. Where the system refuses, all stays as it
/// was.
pub(super) fn bind(processors: &Processors) {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: a set of plain bits, of which zeros are the empty one; numbers beyond it are left out, and the call
        // reads the set only.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            for &processor in processors.range(..libc::CPU_SETSIZE as usize) {
                libc::CPU_SET(processor, &mut set);
            }
            libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = processors;
}

/// The processor that runs this thread now.
fn current() -> Option<usize> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: a question without arguments.
        usize::try_from(unsafe { libc::sched_getcpu() }).ok()
    }
    #[cfg(not(target_os = "linux"))]
    None
}

/// Which of this thread's processors each node has, nodes without any left out; `None` where the system does not tell.
fn shares(nodes: &Path) -> Option<BTreeMap<usize, Processors>> {
    let status = fs::read_to_string("/proc/thread-self/status").ok()?;
    let mine = processors(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?)?;
    shares_of(&mine, nodes)
}

fn shares_of(mine: &Processors, nodes: &Path) -> Option<BTreeMap<usize, Processors>> {
    let nodes = fs::read_dir(nodes).ok()?.flatten().filter_map(|entry| {
        let number = entry.file_name().to_str()?.strip_prefix("node")?.parse::<usize>().ok()?;
        let all = processors(&fs::read_to_string(entry.path().join("cpulist")).ok()?)?;
        Some((number, all.intersection(mine).copied().collect::<Processors>()))
    });
    let shares: BTreeMap<_, _> = nodes.filter(|(_, share)| !share.is_empty()).collect();
    if shares.is_empty() { None } else { Some(shares) }
}

/// A list as the kernel writes it: `0-3,8,10-11`. A node without processors has an empty one.
fn processors(list: &str) -> Option<Processors> {
    let mut all = Processors::new();
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

    /// What the kernel would list for these nodes, in a folder of the test's own.
    fn with_nodes<T>(name: &str, nodes: &[&str], then: impl FnOnce(&Path) -> T) -> T {
        let folder = std::env::temp_dir().join(format!("fornax-nodes-{}-{name}", std::process::id()));
        for (number, list) in nodes.iter().enumerate() {
            let node = folder.join(format!("node{number}"));
            fs::create_dir_all(&node).unwrap();
            fs::write(node.join("cpulist"), format!("{list}\n")).unwrap();
        }
        // Beside the nodes lie files with other names.
        fs::create_dir_all(folder.join("power")).unwrap();
        fs::write(folder.join("online"), "0\n").unwrap();
        let result = then(&folder);
        fs::remove_dir_all(&folder).unwrap();
        result
    }

    fn shares_with(name: &str, mine: &str, nodes: &[&str]) -> Option<BTreeMap<usize, Processors>> {
        with_nodes(name, nodes, |folder| shares_of(&processors(mine).unwrap(), folder))
    }

    #[test]
    fn threads_are_those_of_one_node_that_the_process_may_use() {
        let check = |mine: &str, nodes: &[&str], wanted: Option<usize>| {
            let shares = shares_with("count", mine, nodes);
            let largest = shares.and_then(|shares| shares.values().map(Processors::len).max());
            assert_eq!(largest, wanted, "{mine} of {nodes:?}");
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
    fn threads_that_fit_one_node_are_bound_to_one() {
        let check = |mine: &str, nodes: &[&str], threads, current, wanted: Option<&str>| {
            let chosen = one_of(shares_with("bound", mine, nodes).unwrap(), threads, current);
            let wanted = wanted.map(|list| processors(list).unwrap());
            assert_eq!(chosen, wanted, "{threads} of {mine} on {nodes:?}");
        };
        let two = ["0-31", "32-63"];
        // Where the caller is, or else the first of the largest.
        check("0-63", &two, 32, Some(40), Some("32-63"));
        check("0-63", &two, 8, Some(3), Some("0-31"));
        check("0-63", &two, 32, None, Some("0-31"));
        check("0-3,32-63", &two, 32, Some(2), Some("32-63"));
        check("0-3,32-63", &two, 4, Some(2), Some("0-3"));
        // Asked for more than one node has, or no choice: nobody is bound.
        check("0-63", &two, 33, Some(0), None);
        check("0-15", &["0-15"], 16, Some(0), None);
        check("0-3", &two, 4, Some(0), None);
        check("0-3", &["0-3", ""], 2, Some(0), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_bound_thread_runs_where_it_is_told_and_others_as_before() {
        let mine = || {
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
            processors(list).unwrap()
        };
        let before = mine();
        let last = Processors::from([*before.last().unwrap()]);
        let bound = thread::scope(|scope| {
            let bound = scope.spawn(|| {
                bind(&last);
                (mine(), current())
            });
            bound.join().unwrap()
        });
        assert_eq!(bound, (last.clone(), last.first().copied()));
        assert_eq!(mine(), before);
        bind(&Processors::from([usize::MAX]));
        assert_eq!(mine(), before, "a set that cannot be had changes nothing");
    }

    #[test]
    fn there_is_a_thread_at_least_and_no_more_than_allowed() {
        let allowed = thread::available_parallelism().unwrap().get();
        assert!((1..=allowed).contains(&threads_by_default()));
    }
}
