//! Model files whose headers are whole and whose weights are holes: as large as the real ones, on no disk.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use fornax::random_model::{SHAPES, write_hole};
use fornax_format::DType;
use serde_json::{Map, Value, json};

/// Writes a GGUF of this shape with its matrices in `quant`, and returns its path and size.
pub(crate) fn gguf(folder: &Path, shape: &str, quant: DType) -> (PathBuf, u64) {
    let path = folder.join(format!("{shape}-{}.gguf", quant.name()));
    let shape = SHAPES.iter().find(|known| known.name == shape).unwrap();
    let size = write_hole(&path, shape, quant).unwrap();
    (path, size)
}

/// Mixtral 8x7B as its own repository has it, with every tensor in one safetensors type of this many bytes.
pub(crate) fn mixtral(folder: &Path, dtype: &str, bytes: usize) -> PathBuf {
    let (layers, hidden, ffn, experts, vocab, kv) = (32, 4096, 14336, 8, 32000, 1024);
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]),
        ("lm_head.weight".to_owned(), vec![vocab, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    for layer in 0..layers {
        let mut add =
            |name: String, shape: Vec<usize>| tensors.push((format!("model.layers.{layer}.{name}"), shape));
        add("input_layernorm.weight".to_owned(), vec![hidden]);
        add("post_attention_layernorm.weight".to_owned(), vec![hidden]);
        for (name, rows) in [("q", hidden), ("k", kv), ("v", kv), ("o", hidden)] {
            add(format!("self_attn.{name}_proj.weight"), vec![rows, hidden]);
        }
        add("block_sparse_moe.gate.weight".to_owned(), vec![experts, hidden]);
        for expert in 0..experts {
            for (name, shape) in [("w1", [ffn, hidden]), ("w2", [hidden, ffn]), ("w3", [ffn, hidden])] {
                add(format!("block_sparse_moe.experts.{expert}.{name}.weight"), shape.to_vec());
            }
        }
    }
    drop(safetensors(folder, tensors, dtype, bytes));
    let config = json!({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_local_experts": experts, "num_experts_per_tok": 2, "vocab_size": vocab,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "hidden_act": "silu",
        "sliding_window": null, "tie_word_embeddings": false});
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    folder.to_owned()
}

/// A safetensors file of these tensors, each of a type of this many bytes, all holes.
pub(crate) fn safetensors(
    folder: &Path,
    tensors: Vec<(String, Vec<usize>)>,
    dtype: &str,
    bytes: usize,
) -> File {
    let mut header = Map::new();
    let mut end = 0u64;
    for (name, shape) in tensors {
        let begin = end;
        end += (shape.iter().product::<usize>() * bytes) as u64;
        header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}));
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = File::create(folder.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&header).unwrap();
    file.set_len(8 + header.len() as u64 + end).unwrap();
    file
}
