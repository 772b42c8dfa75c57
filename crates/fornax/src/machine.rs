//! What the operating system says of this machine and this process. Absent where it does not say.

use std::fs;

/// The processor as it names itself.
pub fn processor() -> Option<String> {
    field(&fs::read_to_string("/proc/cpuinfo").ok()?, "model name").map(str::to_owned)
}

/// Threads that this process may run at once.
pub fn cores() -> Option<usize> {
    std::thread::available_parallelism().ok().map(|cores| cores.get())
}

/// Bytes of memory that this process could still get: what the machine has available, or the container's limit.
pub fn memory_available() -> Option<u64> {
    let machine = kilobytes(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable")?;
    let read =
        |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse::<u64>().ok();
    // What a container has read of files counts as its own until somebody needs the room.
    let cached = fs::read_to_string("/sys/fs/cgroup/memory.stat").map_or(0, |stat| cached_bytes(&stat));
    let taken = || read("memory.current").unwrap_or(0).saturating_sub(cached);
    let container = read("memory.max").map(|limit| limit.saturating_sub(taken()));
    Some(container.map_or(machine, |limit| limit.min(machine)))
}

/// Bytes of files that a container's `memory.stat` counts and that can be had back.
fn cached_bytes(stat: &str) -> u64 {
    let fields = stat.lines().filter_map(|line| line.split_once(' '));
    let cached = fields.filter(|(name, _)| matches!(*name, "inactive_file" | "active_file"));
    cached.filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok()).sum()
}

/// Bytes of memory in the machine.
pub fn memory_total() -> Option<u64> {
    kilobytes(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal")
}

/// The most bytes of memory that this process has held so far.
pub fn peak_bytes() -> Option<u64> {
    kilobytes(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM")
}

/// Bytes of memory that are this process's own: what is mapped from files can be taken back at any time.
pub fn own_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let shared = kilobytes(&status, "RssShmem").unwrap_or(0);
    kilobytes(&status, "RssAnon").map(|own| own + shared)
}

/// Seconds of processor time that this process has taken, with all its threads.
pub fn cpu_seconds() -> Option<f64> {
    /// What the kernel counts in, whatever its own clock.
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The name in parentheses may hold anything; fields are counted behind it.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    Some((ticks()? + ticks()?) / TICKS_PER_SECOND)
}

fn kilobytes(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then_some(value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_by_their_whole_name() {
        let text = "MemTotal:       16 kB\nMemAvailable:    9 kB\nmodel name\t: A processor: fast\n";
        assert_eq!(kilobytes(text, "MemAvailable"), Some(9 * 1024));
        assert_eq!(kilobytes(text, "Mem"), None);
        assert_eq!(field(text, "model name"), Some("A processor: fast"));
        let stat = "anon 100\nfile 70\ninactive_anon 5\ninactive_file 30\nactive_file 40\n";
        assert_eq!(cached_bytes(stat), 70);
    }
}
