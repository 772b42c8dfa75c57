//! Adapters that somebody changed at random.

use crate::fixture::folder;

#[path = "../../../../fuzz/src/adapter.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod adapter;
#[path = "../../../../fuzz/src/mutate.rs"]
#[expect(unreachable_pub, reason = "targets of fuzz/ include it, too")]
mod mutate;

const WORDS: &[&[u8]] = &[
    b"\"r\": 0,",
    b"\"r\": 513,",
    b"\"r\": 4294967296,",
    b"\"lora_alpha\": 1e400,",
    b"\"lora_alpha\": -1,",
    b"null",
    b"{}",
    b"[]",
    b"\"dtype\":\"F64\"",
    b"\"dtype\":\"I8\"",
    b"\"shape\":[0,0]",
    b"\"shape\":[4294967296,4294967296]",
    b"\"shape\":[]",
    b"\"data_offsets\":[0,0]",
    b"\"data_offsets\":[18446744073709551615,0]",
    b"lora_A",
    b"lora_B",
    b"layers.99.",
    b"\xffFILE\xff",
    b"\x1b[2J",
    b"\"use_rslora\": true,",
    b"\"use_dora\": true,",
    b"\"peft_type\": \"IA3\",",
    b"self_attn.v_proj",
    b"mlp.up_proj",
];

#[test]
fn changed_adapters_are_taken_or_refused_in_a_line() {
    let scratch = tempfile::tempdir().unwrap();
    let bench = adapter::Bench::new(&folder().join("llama"), scratch.path().to_owned());
    let seeds = mutate::seeds("adapter");
    assert!(seeds.iter().any(|seed| bench.adapter(seed)), "one of them is for this model");
    mutate::cases("adapters", 4000, |mut random| bench.adapter(&mutate::changed(&mut random, &seeds, WORDS)));
}
