//! One file per architecture: its row of facts. A row begins from another's and says what differs.

mod bert;
mod cohere;
mod ernie4_5;
mod exaone4;
mod falcon;
mod gemma;
mod glm4;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod helium;
mod hunyuan;
mod lfm2;
mod llama;
mod mixtral;
mod olmo2;
mod olmoe;
mod phi2;
mod phi3;
mod qwen2;
mod qwen2moe;
mod qwen3;
mod qwen35;
mod qwen3moe;
mod seed_oss;
mod smollm3;
mod stablelm;
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
    gemma::GEMMA,
    gemma::GEMMA2,
    gemma::GEMMA3,
    gemma::GEMMA4,
    gemma::GEMMA4_UNIFIED,
    granite::GRANITE,
    gpt2::GPT2,
    gpt2::STARCODER,
    gpt_oss::GPT_OSS,
    starcoder2::STARCODER2,
    smollm3::SMOLLM3,
    glm4::GLM,
    glm4::GLM4,
    ernie4_5::ERNIE4_5,
    exaone4::EXAONE4,
    hunyuan::HUNYUAN_DENSE,
    hunyuan::HUNYUAN_MOE,
    seed_oss::SEED_OSS,
    cohere::COHERE,
    cohere::COHERE2,
    phi2::PHI2,
    stablelm::STABLELM,
    gpt_neox::GPT_NEOX,
    falcon::FALCON,
    olmoe::OLMOE,
    helium::HELIUM,
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
    (
        &[
            "deepseek2",
            "deepseek_v2",
            "deepseek_v3",
            "kimi_k2",
            "glm4_moe_lite",
            "minicpm3",
            "plm",
            "mistral4",
            "youtu",
        ],
        "latent attention",
    ),
    (
        &["deepseek32", "deepseek_v32", "deepseek4", "deepseek_v4", "glm-dsa", "glm_moe_dsa"],
        "attention to positions that an indexer chooses",
    ),
    (
        &[
            "glm4moe",
            "glm4_moe",
            "minimax-m2",
            "minimax_m2",
            "dots1",
            "bailingmoe2",
            "bailing_moe_v2",
            "ernie4_5-moe",
            "ernie4_5_moe",
            "exaone-moe",
            "exaone_moe",
            "afmoe",
            "solar_open",
        ],
        "experts chosen by other scores than a softmax",
    ),
    (&["arcee", "nemotron", "persimmon", "opt"], "a feed-forward of (squared) ReLU"),
    (&["apertus"], "a feed-forward of xIELU"),
    (&["mistral3", "ministral3", "llama4", "llama4_text"], "queries scaled by their positions"),
    (&["gemma3n", "gemma3n_text"], "embeddings for each layer and layers that share keys"),
    (&["modern-bert", "modernbert", "nomic-bert", "nomic_bert", "eurobert"], "an encoder that rotates"),
    (&["xlm-roberta", "roberta", "mpnet"], "an encoder whose positions do not begin at zero"),
    (&["t5", "t5encoder", "bart", "mbart", "whisper"], "attention between an encoder and a decoder"),
    (&["bloom", "mpt", "baichuan"], "attention biased by distance"),
];
