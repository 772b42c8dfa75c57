//! Model files whose headers are whole and whose weights are holes: as large as the real ones, on no disk.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

/// A llama-like decoder, by its numbers.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) architecture: &'static str,
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) ffn: usize,
    pub(crate) heads: usize,
    pub(crate) heads_kv: usize,
    pub(crate) head_dim: usize,
    pub(crate) vocab: usize,
    pub(crate) context: usize,
    pub(crate) tied: bool,
    pub(crate) qkv_bias: bool,
}

pub(crate) const LLAMA_70B: Shape = Shape {
    architecture: "llama",
    layers: 80,
    hidden: 8192,
    ffn: 28672,
    heads: 64,
    heads_kv: 8,
    head_dim: 128,
    vocab: 128_256,
    context: 8192,
    tied: false,
    qkv_bias: false,
};

pub(crate) const QWEN_0_5B: Shape = Shape {
    architecture: "qwen2",
    layers: 24,
    hidden: 896,
    ffn: 4864,
    heads: 14,
    heads_kv: 2,
    head_dim: 64,
    vocab: 151_936,
    context: 32_768,
    tied: true,
    qkv_bias: true,
};

/// A ggml type: its id, values and bytes of a block.
pub(crate) type Ggml = (u32, usize, usize);
pub(crate) const F32: Ggml = (0, 1, 4);
pub(crate) const Q8_0: Ggml = (8, 32, 34);
pub(crate) const Q5_K: Ggml = (13, 256, 176);

/// Writes a GGUF of this shape with its matrices in `matrices`, and returns its path and size.
pub(crate) fn gguf(folder: &Path, shape: &Shape, matrices: Ggml) -> (PathBuf, u64) {
    let mut metadata = Vec::new();
    let key = |metadata: &mut Vec<u8>, key: &str, kind: u32| {
        metadata.extend((key.len() as u64).to_le_bytes());
        metadata.extend(key.as_bytes());
        metadata.extend(kind.to_le_bytes());
    };
    key(&mut metadata, "general.architecture", 8);
    metadata.extend((shape.architecture.len() as u64).to_le_bytes());
    metadata.extend(shape.architecture.as_bytes());
    let integers = [
        ("block_count", shape.layers),
        ("embedding_length", shape.hidden),
        ("feed_forward_length", shape.ffn),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.heads_kv),
        ("context_length", shape.context),
    ];
    for (name, value) in integers {
        key(&mut metadata, &format!("{}.{name}", shape.architecture), 4);
        metadata.extend(u32::try_from(value).unwrap().to_le_bytes());
    }
    key(&mut metadata, &format!("{}.attention.layer_norm_rms_epsilon", shape.architecture), 6);
    metadata.extend(1e-5f32.to_le_bytes());

    let (query, kv) = (shape.heads * shape.head_dim, shape.heads_kv * shape.head_dim);
    // (name, columns, rows; no rows for a vector)
    let mut tensors = vec![
        ("token_embd.weight".to_owned(), shape.hidden, shape.vocab),
        ("output_norm.weight".to_owned(), shape.hidden, 0),
    ];
    if !shape.tied {
        tensors.push(("output.weight".to_owned(), shape.hidden, shape.vocab));
    }
    for layer in 0..shape.layers {
        let mut add =
            |name: &str, columns, rows| tensors.push((format!("blk.{layer}.{name}"), columns, rows));
        add("attn_norm.weight", shape.hidden, 0);
        add("attn_q.weight", shape.hidden, query);
        add("attn_k.weight", shape.hidden, kv);
        add("attn_v.weight", shape.hidden, kv);
        add("attn_output.weight", query, shape.hidden);
        add("ffn_norm.weight", shape.hidden, 0);
        add("ffn_gate.weight", shape.hidden, shape.ffn);
        add("ffn_up.weight", shape.hidden, shape.ffn);
        add("ffn_down.weight", shape.ffn, shape.hidden);
        if shape.qkv_bias {
            add("attn_q.bias", query, 0);
            add("attn_k.bias", kv, 0);
            add("attn_v.bias", kv, 0);
        }
    }
    let mut infos = Vec::new();
    let mut data = 0u64;
    for (name, columns, rows) in &tensors {
        let (id, block_values, block_bytes) = if *rows == 0 { F32 } else { matrices };
        infos.extend((name.len() as u64).to_le_bytes());
        infos.extend(name.as_bytes());
        let dimensions: &[usize] = if *rows == 0 { &[*columns] } else { &[*columns, *rows] };
        infos.extend((dimensions.len() as u32).to_le_bytes());
        for dimension in dimensions {
            infos.extend((*dimension as u64).to_le_bytes());
        }
        infos.extend(id.to_le_bytes());
        infos.extend(data.to_le_bytes());
        let bytes = columns * (*rows).max(1) / block_values * block_bytes;
        data = (data + bytes as u64).next_multiple_of(32);
    }
    let path = folder.join("sparse.gguf");
    let mut file = File::create(&path).unwrap();
    let counts = [tensors.len() as u64, integers.len() as u64 + 2];
    let mut header = b"GGUF\x03\0\0\0".to_vec();
    header.extend(counts.iter().flat_map(|count| count.to_le_bytes()));
    header.extend(metadata);
    header.extend(infos);
    header.resize(header.len().next_multiple_of(32), 0);
    file.write_all(&header).unwrap();
    let size = header.len() as u64 + data;
    file.set_len(size).unwrap();
    (path, size)
}

/// Mixtral 8x7B as its own repository has it, with every tensor in one safetensors type of so many bytes.
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
    let config = json!({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_local_experts": experts, "num_experts_per_tok": 2, "vocab_size": vocab,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "hidden_act": "silu",
        "sliding_window": null, "tie_word_embeddings": false});
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    folder.to_owned()
}
