//! What a model tells a backend of its weights and its attention while it is loaded.

use std::cell::RefCell;

use fornax_compute::{Attention, Error, Glu, KvSpec, Memory, Part, Purpose, Role, Usage};
use fornax_model::{Adapter, Config, Limits, measure_with};

use crate::adapters::adapter;
use crate::fixture::{Container, open};

/// A memory that listens.
#[derive(Default)]
struct Told {
    roles: RefCell<Vec<Role>>,
    /// Whether a table is multiplied by as well.
    tied: RefCell<Vec<bool>>,
    rotates: RefCell<Vec<bool>>,
}

impl Memory for Told {
    type Weight = ();
    type Buf = ();
    type Kv = ();

    fn upload(&self, _: &[Part<'_>]) -> Result<(), Error> {
        panic!("every weight has a role");
    }

    fn upload_for(&self, role: Role, _: &[Part<'_>]) -> Result<(), Error> {
        self.roles.borrow_mut().push(role);
        Ok(())
    }

    fn upload_table(&self, _: &[Part<'_>], tied: bool) -> Result<(), Error> {
        self.tied.borrow_mut().push(tied);
        Ok(())
    }

    fn upload_vector(&self, _: &[Part<'_>]) -> Result<(), Error> {
        Ok(())
    }

    fn upload_values(&self, _: &[f32]) -> Result<(), Error> {
        Ok(())
    }

    fn alloc(&self, _: Purpose, _: usize, _: usize) -> Result<(), Error> {
        Ok(())
    }

    fn alloc_kv(&self, _: &KvSpec) -> Result<(), Error> {
        Ok(())
    }

    fn foresee(&self, _: &Attention<()>, rotates: bool) {
        self.rotates.borrow_mut().push(rotates);
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }

    fn reads(&self) -> bool {
        false
    }
}

fn told(case: &str, adapters: &[Adapter]) -> Told {
    let checkpoint = open(case, Container::HuggingFace);
    let config = Config::read(&checkpoint).unwrap();
    let memory = Told::default();
    let limits = Limits { tokens_max: 8, wanted_max: 2 };
    measure_with(&checkpoint, &config, adapters, &memory, limits).unwrap();
    memory
}

#[test]
fn a_weight_comes_with_what_it_does() {
    let check = |case, adapters: &[Adapter], second: Role| {
        let told = told(case, adapters);
        let layers = told.rotates.borrow().len();
        let mut roles = told.roles.borrow().clone();
        // A head, or a table that is one.
        let heads = roles.iter().filter(|role| **role == Role::Head).count();
        let tied = told.tied.borrow().iter().filter(|tied| **tied).count();
        assert_eq!(heads + tied, 1, "{case}");
        roles.retain(|role| *role != Role::Head);
        let layer = [Role::Tokens, Role::Tokens, second, Role::Tokens];
        assert_eq!(roles, layer.repeat(layers), "{case}");
    };
    let gates = |glu, adapted| Role::Gates { glu, adapted };
    check("llama", &[], gates(Glu::Silu, false));
    check("phi3", &[], gates(Glu::Silu, false));
    check("gemma2", &[], gates(Glu::GeluTanh, false));
    check("gpt2", &[], Role::Tokens);
    check("starcoder2", &[], Role::Tokens);
    check("llama", &[adapter("llama-all")], gates(Glu::Silu, true));
    check("llama", &[adapter("llama-qv")], gates(Glu::Silu, false));
}

#[test]
fn attention_is_foreseen_with_whether_queries_are_turned() {
    for (case, wanted) in [("llama", true), ("gemma3", true), ("gpt2", false)] {
        let told = told(case, &[]);
        let rotates = told.rotates.borrow();
        assert!(!rotates.is_empty() && rotates.iter().all(|rotates| *rotates == wanted), "{case}");
    }
}
