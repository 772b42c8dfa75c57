//! RoBERTa and what has its blocks (XLM-R, CamemBERT; BGE-M3 and the multilingual E5 are XLM-R): BERT's, with positions that begin
//! behind the padding token's, and another head in those that rank. In GGUF they say that they are a bert.

use super::bert::{BERT, BODY};
use crate::Facts;
use crate::facts::FirstPosition;
use crate::names::Dim::{Hidden, One};
use crate::names::Owner::Model;
use crate::names::{Name, Tensor as T, Transform::Keep, When::Ranks, name};

pub(crate) const XLM_ROBERTA: Facts = Facts {
    name: "xlm-roberta",
    gguf: None,
    model_types: &["xlm-roberta", "roberta", "camembert"],
    classes: &[
        "XLMRobertaModel",
        "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification",
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "CamembertModel",
        "CamembertForMaskedLM",
        "CamembertForSequenceClassification",
    ],
    beginnings: &[("", "roberta.")],
    not_text: &["pooler.", "roberta.pooler.", "lm_head."],
    names: &[BODY, HEAD],
    first_position: FirstPosition::BehindPadding,
    ..BERT
};

#[rustfmt::skip] // A table: one line per weight.
const HEAD: &[Name] = &[
    name(T::Pooler, Model, "cls.weight", Some("classifier.dense.weight"), (&[Hidden, Hidden], Ranks, Keep)),
    name(T::PoolerBias, Model, "cls.bias", Some("classifier.dense.bias"), (&[Hidden], Ranks, Keep)),
    name(T::Classifier, Model, "cls.output.weight", Some("classifier.out_proj.weight"), (&[One, Hidden], Ranks, Keep)),
    name(T::ClassifierBias, Model, "cls.output.bias", Some("classifier.out_proj.bias"), (&[One], Ranks, Keep)),
];
