//! Layers that read the keys and values of another layer.

use fornax_compute::KvKind;
use fornax_model::{Config, Mixer};
use serde_json::Value;

use crate::fixture::{Golden, open_hugging_face};
use crate::rig::{Mode, Rig, Room, logits};

const CASE: &str = "llama";

/// Where a tensor's bytes lie in a safetensors file.
fn place(file: &[u8], name: &str) -> std::ops::Range<usize> {
    let len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&file[8..8 + len]).unwrap();
    let at = |index: usize| 8 + len + header[name]["data_offsets"][index].as_u64().unwrap() as usize;
    at(0)..at(1)
}

/// A first layer that adds nothing, and a second one with its norm and its keys and values: both make the same ones.
fn make_alike(file: &mut [u8]) {
    let layer = |layer: usize, name: &str| format!("model.layers.{layer}.{name}.weight");
    for name in ["self_attn.o_proj", "mlp.down_proj"] {
        let place = place(file, &layer(0, name));
        file[place].fill(0);
    }
    for name in ["input_layernorm", "self_attn.k_proj", "self_attn.v_proj"] {
        let (from, to) = (place(file, &layer(0, name)), place(file, &layer(1, name)));
        file.copy_within(from, to.start);
    }
}

#[test]
fn a_layer_reads_the_keys_of_the_layer_that_it_names() {
    let checkpoint = open_hugging_face(CASE, |_| {}, |file| make_alike(file));
    let own = Config::read(&checkpoint).unwrap();
    let mut shared = own.clone();
    let Mixer::Attention(attention) = &mut shared.layers[1].mixer else { panic!("it attends") };
    attention.keys_of = Some(0);
    let Golden { tokens, .. } = Golden::read(CASE);
    let all = |config: &Config, tokens_max: usize| {
        let room = Room { tokens_max, sequences: 1, context: tokens.len() };
        let mut rig = Rig::new(&checkpoint, config, Mode::float(), room).unwrap();
        logits(&mut rig, &tokens, tokens_max)
    };
    let wanted = all(&own, tokens.len());
    assert_eq!(all(&shared, tokens.len()), wanted);
    assert_eq!(all(&shared, 7), wanted, "in chunks");
    // And the cache has room for the others alone.
    let layers = |config: &Config| config.kv_groups(2).iter().map(|group| group.layers).sum::<usize>();
    assert_eq!(layers(&shared) + 1, layers(&own));
    assert!(matches!(shared.kv_groups(2)[0].kind, KvKind::Pairs { .. }));
}
