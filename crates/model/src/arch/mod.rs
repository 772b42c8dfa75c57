//! One file per architecture: its row of facts. A row begins from another's and says what differs.

mod apertus;
mod arcee;
mod bert;
mod cohere;
mod cwm;
mod deepseek;
mod dots1;
mod ernie4_5;
mod eurobert;
mod exaone4;
mod falcon;
mod falcon_h1;
mod gemma;
mod glm4;
mod glm4moe;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod granite_hybrid;
mod helium;
mod hunyuan;
mod hyperclovax;
mod jais2;
mod jamba;
mod lfm2;
mod llama;
mod llama4;
mod mamba2;
mod minimax_m2;
mod mixtral;
mod modernbert;
mod nemotron;
mod nemotron_h;
mod nomic_bert;
mod olmo2;
mod olmoe;
mod opt;
mod phi2;
mod phi3;
mod qwen2;
mod qwen2moe;
mod qwen3;
mod qwen35;
mod qwen3moe;
mod qwen3vl;
mod seed_oss;
mod smollm3;
mod stablelm;
mod starcoder2;
mod xlm_roberta;

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
    qwen3vl::QWEN3_VL,
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
    arcee::ARCEE,
    nemotron::NEMOTRON,
    jais2::JAIS2,
    opt::OPT,
    hyperclovax::HYPERCLOVAX,
    cwm::CWM,
    gemma::VAULTGEMMA,
    bert::BERT,
    xlm_roberta::XLM_ROBERTA,
    nomic_bert::NOMIC_BERT,
    modernbert::MODERNBERT,
    gemma::EMBEDDING_GEMMA,
    eurobert::EUROBERT,
    qwen35::QWEN35,
    qwen35::QWEN35_MOE,
    qwen35::QWEN3_NEXT,
    lfm2::LFM2,
    granite_hybrid::GRANITE_HYBRID,
    lfm2::LFM2_MOE,
    glm4moe::GLM4_MOE,
    glm4moe::SOLAR_OPEN,
    minimax_m2::MINIMAX_M2,
    ernie4_5::ERNIE4_5_MOE,
    dots1::DOTS1,
    exaone4::EXAONE_MOE,
    hunyuan::HY_V3,
    mamba2::MAMBA2,
    nemotron_h::NEMOTRON_H,
    nemotron_h::NEMOTRON_H_MOE,
    jamba::JAMBA,
    jamba::MAMBA,
    jamba::FALCON_MAMBA,
    falcon_h1::FALCON_H1,
    llama::MINISTRAL3,
    llama4::LLAMA4,
    apertus::APERTUS,
    deepseek::DEEPSEEK_V3,
    deepseek::DEEPSEEK_V2,
    deepseek::GLM4_MOE_LITE,
    deepseek::MISTRAL4,
    deepseek::YOUTU,
];

/// What people ask for and cannot have: spellings in both containers, and what there is no operation for.
pub(crate) const NOT_YET: &[(&[&str], &str)] = &[
    (&["bamba", "zamba", "zamba2", "plamo2"], "state-space layers"),
    (&["rwkv6", "rwkv7", "rwkv6qwen2", "arwkv7", "rwkv"], "recurrent layers"),
    (&["kimi-linear", "kimi_linear"], "layers of linear attention that decay value by value"),
    (&["minicpm3", "plm"], "latent attention beside scales of its own"),
    (&["longcat_flash", "longcat-flash"], "experts that compute nothing, and two attentions a layer"),
    (
        &["deepseek32", "deepseek_v32", "deepseek4", "deepseek_v4", "glm-dsa", "glm_moe_dsa"],
        "attention to positions that an indexer chooses",
    ),
    (&["bailingmoe2", "bailing_moe_v2", "internlm2"], "another implementation to be compared with"),
    (&["afmoe"], "norms behind experts"),
    (&["granitemoe", "granitemoeshared"], "experts whose sum is scaled"),
    (&["persimmon"], "layer norms of queries and keys"),
    (&["gemma3n", "gemma3n_text"], "embeddings for each layer and layers that share keys"),
    (&["mpnet", "deberta", "deberta-v2"], "attention biased by buckets of distance"),
    (&["t5", "t5encoder", "bart", "mbart", "whisper"], "attention between an encoder and a decoder"),
    (&["bloom", "mpt", "baichuan", "jais"], "attention biased by distance"),
];
