//! One file per architecture: its row of facts. A row begins from another's and says what differs.

mod bert;
mod gemma;
mod gpt2;
mod gpt_oss;
mod granite;
mod lfm2;
mod llama;
mod mixtral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen2moe;
mod qwen3;
mod qwen35;
mod qwen3moe;
mod starcoder2;

use crate::Facts;

/// Every architecture.
pub(crate) const TABLE: &[Facts] = &[
    llama::LLAMA,
    llama::MISTRAL,
    mixtral::MIXTRAL,
    qwen2::QWEN2,
    qwen2moe::QWEN2_MOE,
    qwen3::QWEN3,
    qwen3moe::QWEN3_MOE,
    olmo2::OLMO2,
    phi3::PHI3,
    gemma::GEMMA2,
    gemma::GEMMA3,
    granite::GRANITE,
    gpt2::GPT2,
    gpt_oss::GPT_OSS,
    starcoder2::STARCODER2,
    bert::BERT,
    qwen35::QWEN35,
    qwen35::QWEN35_MOE,
    qwen35::QWEN3_NEXT,
    lfm2::LFM2,
];

/// What people ask for and cannot have: spellings in both containers, and what there is no operation for.
pub(crate) const NOT_YET: &[(&[&str], &str)] = &[
    (
        &[
            "mamba",
            "mamba2",
            "falcon_mamba",
            "jamba",
            "falcon-h1",
            "falcon_h1",
            "nemotron_h",
            "nemotron_h_moe",
        ],
        "state-space layers",
    ),
    (&["granitehybrid", "granitemoehybrid", "bamba", "zamba", "zamba2", "plamo2"], "state-space layers"),
    (&["rwkv6", "rwkv7", "rwkv6qwen2", "arwkv7", "rwkv"], "recurrent layers"),
    (&["kimi-linear", "kimi_linear"], "layers of linear attention that decay value by value"),
    (&["lfm2moe", "lfm2_moe"], "experts that are chosen by sigmoid"),
    (&["deepseek2", "deepseek_v2", "deepseek_v3", "minicpm3", "plm"], "latent attention"),
    (&["t5", "t5encoder", "bart", "mbart", "whisper"], "attention between an encoder and a decoder"),
    (&["bloom", "mpt", "baichuan"], "attention biased by distance"),
];
