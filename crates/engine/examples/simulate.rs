//! Lives of an engine at full scale: `cargo run --profile checked -p fornax-engine --example simulate -- SEEDS [FIRST]`
#![expect(clippy::print_stdout, reason = "a command-line program")]

use fornax_engine::simulation::{Life, live};

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<u64>().expect("a number"));
    let seeds = arguments.next().unwrap_or(1000);
    let first = arguments.next().unwrap_or(0);
    // Panics on purpose are part of the simulation; a real one still names its seed below.
    std::panic::set_hook(Box::new(|info| {
        if !info.to_string().contains("on purpose") {
            println!("{info}");
        }
    }));
    let mut all = Life::default();
    for seed in first..first + seeds {
        match std::panic::catch_unwind(|| live(seed, 100)) {
            Ok(life) => all.add(&life),
            Err(_) => {
                println!("seed {seed} failed; replay it with: simulate 1 {seed}");
                std::process::exit(1);
            }
        }
    }
    println!("{seeds} lives from seed {first}: {all:?}");
}
