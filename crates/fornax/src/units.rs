//! Sizes for people.

/// A size of a file or a download, in decimal units.
#[must_use]
pub fn bytes(count: u64) -> String {
    let count = count as f64;
    match count {
        _ if count >= 1e9 => format!("{:.2} GB", count / 1e9),
        _ if count >= 1e6 => format!("{:.1} MB", count / 1e6),
        _ if count >= 1e3 => format!("{:.1} kB", count / 1e3),
        _ => format!("{count} B"),
    }
}

/// A size of memory, in binary units.
#[must_use]
pub fn binary(count: u64) -> String {
    let count = count as f64;
    let (kib, mib, gib) = (1024.0, 1024.0 * 1024.0, 1024.0 * 1024.0 * 1024.0);
    match count {
        _ if count >= gib => format!("{:.1} GiB", count / gib),
        _ if count >= mib => format!("{:.1} MiB", count / mib),
        _ if count >= kib => format!("{:.1} KiB", count / kib),
        _ => format!("{count} B"),
    }
}

/// How many parameters a model has, as models are named: `135M`, `1.54B`.
#[must_use]
pub fn parameters(count: u64) -> String {
    let count = count as f64;
    match count {
        _ if count >= 9.95e9 => format!("{:.0}B", count / 1e9),
        _ if count >= 1e9 => format!("{:.1}B", count / 1e9),
        _ if count >= 1e6 => format!("{:.0}M", count / 1e6),
        _ => format!("{:.0}k", count / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        let check = |count: u64, text: &str| assert_eq!(bytes(count), text);
        check(0, "0 B");
        check(999, "999 B");
        check(98_362_432, "98.4 MB");
        check(4_000_000_000, "4.00 GB");
        let check = |count: u64, text: &str| assert_eq!(binary(count), text);
        check(1023, "1023 B");
        check(12_288, "12.0 KiB");
        check(180 << 20, "180.0 MiB");
        check(46_702_792_704, "43.5 GiB");
        let check = |count: u64, text: &str| assert_eq!(parameters(count), text);
        check(134_515_008, "135M");
        check(1_543_714_304, "1.5B");
        check(20_914_757_184, "21B");
    }
}
