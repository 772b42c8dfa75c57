//! The processor with products of integers, done elsewhere or here: private inference and its reference.

use std::path::{Path, PathBuf};

use fornax_compute::KvDType;
use fornax_engine::{Plan, StepLimits};
use fornax_private::{Client, ClientOptions, Integer, IntegerSizes, Parties, Products, Reference};

use super::Device;
use super::cpu::CpuArm;
use super::place::{Arm, Loaded, Place};
use crate::Error;
use crate::private::Private;

pub(super) fn place(cpu: CpuArm, private: &Private, model: &Path) -> Box<dyn Place> {
    let words = format!("{}, {private}", Arm::words(&cpu));
    match private {
        Private::Parties(parties) => {
            let whose = Theirs { parties: parties.clone(), model: model.to_owned() };
            Box::new(Integers { cpu, words, whose })
        }
        Private::Reference => Box::new(Integers { cpu, words, whose: Ours }),
    }
}

/// Who multiplies.
trait Whose: Send + 'static {
    type Products: Products + 'static;

    fn products(&self, threads: usize) -> Result<Self::Products, Error>;

    /// Told when every matrix is known.
    fn loaded(products: &mut Self::Products) -> Result<(), Error>;
}

struct Theirs {
    parties: ClientOptions,
    model: PathBuf,
}

impl Whose for Theirs {
    type Products = Client;

    fn products(&self, _: usize) -> Result<Client, Error> {
        let path = self.model.clone();
        let recompute = move |number| crate::private::matrix(&path, number);
        Ok(Client::new(Parties::connect(self.parties.clone())?, Box::new(recompute)))
    }

    fn loaded(products: &mut Client) -> Result<(), Error> {
        Ok(products.ready()?)
    }
}

struct Ours;

impl Whose for Ours {
    type Products = Reference;

    fn products(&self, threads: usize) -> Result<Reference, Error> {
        Ok(Reference::new(threads))
    }

    fn loaded(_: &mut Reference) -> Result<(), Error> {
        Ok(())
    }
}

struct Integers<W> {
    cpu: CpuArm,
    words: String,
    whose: W,
}

impl<W: Whose> Arm for Integers<W> {
    type Backend = Integer<W::Products>;
    type Sizes = IntegerSizes;

    fn device(&self) -> Device {
        Arm::device(&self.cpu)
    }

    fn words(&self) -> String {
        self.words.clone()
    }

    fn threads(&self) -> usize {
        Arm::threads(&self.cpu)
    }

    fn step_tokens(&self) -> usize {
        self.cpu.step_tokens()
    }

    fn kv_dtype(&self) -> KvDType {
        self.cpu.kv_dtype()
    }

    fn runtime_bytes(&self, vocabulary: u64) -> u64 {
        self.cpu.runtime_bytes(vocabulary)
    }

    fn free_bytes(&self) -> Result<Option<u64>, Error> {
        self.cpu.free_bytes()
    }

    fn sizes(&self, step: StepLimits) -> IntegerSizes {
        IntegerSizes(self.cpu.sizes(step))
    }

    fn depth(&self) -> usize {
        self.cpu.depth()
    }

    /// Finds the servers first, so that what is wrong with them is known before anything is loaded.
    fn open(&self, plan: &Plan) -> Result<Integer<W::Products>, Error> {
        let products = self.whose.products(Arm::threads(self))?;
        Ok(Integer::new(self.cpu.open(plan)?, products))
    }

    fn loaded(&self, loaded: &mut Loaded<Integer<W::Products>>, _: &Plan) -> Result<(), Error> {
        loaded.backend.with_products(W::loaded)
    }
}
