//! Llama 2 and 3, and what has its blocks: Mistral, SmolLM, TinyLlama.

use fornax_compute::{Backend, Error, Glu, Memory, Norm, Rows};

use crate::attention::Attention;
use crate::decoder::{Activations, Ends, norm};
use crate::facts::{BiasRule, QkRows, WindowRule};
use crate::loader::Loader;
use crate::mlp::Mlp;
use crate::names::Tensor;
use crate::{Facts, Limits, Model, names};

pub(crate) const LLAMA: Facts = Facts {
    name: "llama",
    gguf: Some("llama"),
    model_types: &["llama"],
    classes: &["LlamaForCausalLM", "LLaMAForCausalLM"],
    names: names::DECODER,
    gguf_qk_rows: QkRows::Pairs,
    bias: BiasRule::Configured,
    window: WindowRule::Never,
    rope_base: 10000.0,
    glu: Glu::Silu,
};

/// In GGUF a Mistral says that it is a llama.
pub(crate) const MISTRAL: Facts = Facts {
    name: "mistral",
    gguf: None,
    model_types: &["mistral"],
    classes: &["MistralForCausalLM"],
    bias: BiasRule::Never,
    window: WindowRule::EveryLayer(4096),
    ..LLAMA
};

/// Weights and activations.
pub(crate) struct Llama<M: Memory> {
    ends: Ends<M>,
    layers: Vec<Layer<M>>,
    activations: Activations<M>,
}

struct Layer<M: Memory> {
    attention_norm: Norm<M::Buf>, // (hidden)
    attention: Attention<M>,
    mlp_norm: Norm<M::Buf>, // (hidden)
    mlp: Mlp<M>,
}

impl<M: Memory> Llama<M> {
    pub(crate) fn load(loader: &mut Loader<'_, M>, limits: Limits) -> Result<Llama<M>, crate::Error> {
        let ends = Ends::load(loader)?;
        let layers =
            (0..loader.config.layers).map(|layer| Layer::load(loader, layer)).collect::<Result<_, _>>()?;
        let activations = Activations::alloc(loader.memory, loader.config, limits)?;
        Ok(Llama { ends, layers, activations })
    }
}

impl<M: Memory> Layer<M> {
    fn load(loader: &mut Loader<'_, M>, layer: usize) -> Result<Layer<M>, crate::Error> {
        Ok(Layer {
            attention_norm: norm(loader, Tensor::AttentionNorm, layer)?,
            attention: Attention::load(loader, layer)?,
            mlp_norm: norm(loader, Tensor::MlpNorm, layer)?,
            mlp: Mlp::load(loader, layer)?,
        })
    }
}

impl<B: Backend> Model<B> for Llama<B> {
    fn forward(&mut self, backend: &B, kv: &mut B::Kv, step: &B::Step) -> Result<(), Error> {
        let Llama { ends, layers, activations: a } = self;
        backend.embed(step, &ends.embedding, &mut a.residual)?;
        for layer in layers {
            backend.rms_norm(step, Rows::Tokens, &layer.attention_norm, &a.residual, &mut a.branch)?;
            layer.attention.forward(backend, step, &ends.rope, kv, a)?;

            backend.rms_norm(step, Rows::Tokens, &layer.mlp_norm, &a.residual, &mut a.branch)?;
            layer.mlp.forward(backend, step, a)?;
        }
        ends.logits(backend, step, a)
    }

    fn hidden(&mut self, backend: &B, step: &B::Step) -> Result<&B::Buf, Error> {
        self.ends.hidden(backend, step, &mut self.activations)?;
        Ok(&self.activations.wanted_normed)
    }

    fn logits(&self) -> &B::Buf {
        &self.activations.logits
    }
}
