//! A model in one line: `smollm2 · 135M Q4_1 · 8192 tokens · cpu, 2 threads`.

use fornax::{Device, Plan, units};

use super::device;

/// What is known of a model before it is loaded: its name, size, type, and the context of each of its requests.
pub(crate) fn model(name: &str, plan: &Plan) -> String {
    let parameters = plan.stored.iter().map(|stored| stored.values).sum();
    let times = if plan.parallel > 1 { format!(" x {}", plan.parallel) } else { String::new() };
    format!("{name} · {} {} · {} tokens{times}", units::parameters(parameters), quant(plan), plan.context)
}

/// The type that holds most of a model's weights.
pub(crate) fn quant(plan: &Plan) -> &'static str {
    plan.stored.iter().max_by_key(|stored| stored.bytes).map_or("", |stored| stored.dtype.name())
}

/// Where it runs, and in brackets why, if that was left to us.
pub(crate) fn place(device: Device, words: &str, auto: bool) -> String {
    if !auto {
        return words.to_owned();
    }
    match device {
        Device::Cpu => format!("{words} ({})", reason(&device::auto().1)),
        _ => format!("{words} ({})", device::auto().1),
    }
}

/// The heart of why a device cannot be used, without what could be done about it.
fn reason(why: &str) -> &str {
    let why = why.split_once(" is not available: ").map_or(why, |(_, reason)| reason);
    why.split([';', '(']).next().unwrap_or(why).trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_short() {
        let check = |why: &str, wanted: &str| assert_eq!(reason(why), wanted);
        check(
            "device cuda:0 is not available: the NVIDIA driver is not installed (no libcuda); install it, or use --device cpu",
            "the NVIDIA driver is not installed",
        );
        check("something else", "something else");
    }
}
