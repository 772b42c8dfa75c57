//! A tiny model with its two servers in this process, and a client that computes it step by step.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use fornax_compute::cpu::{Cpu, CpuOptions, CpuRing, CpuRingOptions, Kv};
use fornax_compute::{
    Backend, Batch, KvDType, KvGroup, KvSpec, Memory, PAGE_TOKENS, PageId, Ring, Row, Token,
};
use fornax_format::Checkpoint;
use fornax_model::{Config, Limits, Model, load, measure};
use fornax_private::frame::Party;
use fornax_private::{
    Client, ClientOptions, Collector, Error, Fingerprint, Integer, Loaded, Matrix, Opening, Parties,
    Products, Recompute, Reference, Server, ServerOptions,
};

pub(crate) const CONTEXT: usize = 64;

/// A tiny checkpoint; or the real model that a proof names in place of all of them.
pub(crate) fn path(case: &str) -> PathBuf {
    match std::env::var_os("FORNAX_PRIVATE_MODEL") {
        Some(model) => PathBuf::from(model),
        None => fixture(case),
    }
}

pub(crate) fn fixture(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(case)
}

/// Products of one step.
pub(crate) fn rounds(case: &str) -> usize {
    matrices(case).len()
}

/// Every matrix of a model, as a server or an accuser loads them; read once.
pub(crate) fn matrices(case: &str) -> Arc<Vec<Matrix>> {
    static READ: Mutex<BTreeMap<PathBuf, Arc<Vec<Matrix>>>> = Mutex::new(BTreeMap::new());
    let mut read = READ.lock().unwrap();
    Arc::clone(read.entry(path(case)).or_insert_with(|| Arc::new(quantised(case))))
}

fn quantised(case: &str) -> Vec<Matrix> {
    let checkpoint = Checkpoint::open(&path(case)).unwrap();
    let config = Config::read(&checkpoint).unwrap();
    let found = RefCell::new(Vec::new());
    let collect = |number, matrix| {
        let mut found = found.borrow_mut();
        assert_eq!(number, found.len());
        found.push(matrix);
        Ok(())
    };
    let limits = Limits { tokens_max: 1, wanted_max: 1 };
    measure(&checkpoint, &config, &Collector::new(collect), limits).unwrap();
    found.into_inner()
}

pub(crate) fn loaded(case: &str) -> Result<Loaded<CpuRing>, Error> {
    let ring = CpuRing::new(&CpuRingOptions { threads: 1, ..CpuRingOptions::default() })?;
    let mut fingerprint = Fingerprint::default();
    let mut on_device = Vec::new();
    for matrix in matrices(case).iter() {
        fingerprint.add(matrix);
        on_device.push(ring.matrix(matrix.rows, matrix.columns, &matrix.weights)?);
    }
    let (shapes, weights) = fingerprint.finish();
    Ok(Loaded { ring, matrices: on_device, shapes, weights })
}

pub(crate) fn serve_with(case: &'static str, options: ServerOptions) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = ServerOptions { demo_single_host: true, ..options };
    Server::start_lending(listener, options, move || loaded(case)).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn serve(case: &'static str) -> [Server; 2] {
    [Party::Zero, Party::One].map(|party| serve_with(case, ServerOptions::new(party)))
}

pub(crate) fn url(server: &Server) -> String {
    format!("tcp://{}", server.address())
}

pub(crate) fn options(servers: &[Server; 2]) -> ClientOptions {
    ClientOptions { demo_single_host: true, ..ClientOptions::new(url(&servers[0]), url(&servers[1])) }
}

pub(crate) fn recompute(case: &'static str) -> Recompute {
    Box::new(move |number| Ok(matrices(case)[number].clone()))
}

/// A model on the client's backend, with one sequence.
pub(crate) struct Rig<P: Products + 'static> {
    pub(crate) backend: Rc<Integer<P>>,
    model: Box<dyn Model<Integer<P>>>,
    kv: Kv,
    groups: Vec<KvGroup>,
    vocab: usize,
    computed: usize,
}

impl Rig<Client> {
    pub(crate) fn private(case: &'static str, options: ClientOptions) -> Result<Rig<Client>, Error> {
        let client = Client::new(Parties::connect(options)?, recompute(case));
        Rig::ready(case, client)
    }

    pub(crate) fn with_masks(
        case: &'static str,
        options: ClientOptions,
        opening: Opening,
    ) -> Result<Rig<Client>, Error> {
        let client = Client::with_masks(Parties::connect(options)?, recompute(case), opening);
        Rig::ready(case, client)
    }

    fn ready(case: &str, client: Client) -> Result<Rig<Client>, Error> {
        let rig = Rig::new(case, client);
        rig.backend.with_products(Client::ready)?;
        Ok(rig)
    }
}

impl Rig<Reference> {
    pub(crate) fn reference(case: &str) -> Rig<Reference> {
        Rig::new(case, Reference::new(1))
    }
}

impl<P: Products + 'static> Rig<P> {
    pub(crate) fn new(case: &str, products: P) -> Rig<P> {
        let checkpoint = Checkpoint::open(&path(case)).unwrap();
        let config = Config::read(&checkpoint).unwrap();
        let cpu = CpuOptions { threads: 1, tokens_max: CONTEXT, slots: 1, ..CpuOptions::default() };
        let backend = Rc::new(Integer::new(Cpu::new(cpu).unwrap(), products));
        let limits = Limits { tokens_max: CONTEXT, wanted_max: CONTEXT };
        let model = load(&checkpoint, &config, &*backend, limits, &mut |_, _| {}).unwrap();
        let groups = config.kv_groups(1 + CONTEXT.div_ceil(PAGE_TOKENS));
        let kv = backend.alloc_kv(&KvSpec { groups: groups.clone(), dtype: KvDType::F32 }).unwrap();
        Rig { backend, model, kv, groups, vocab: config.vocab, computed: 0 }
    }

    /// Forgets the sequence.
    pub(crate) fn restart(&mut self) {
        self.computed = 0;
    }

    /// Logits after each of the tokens.
    pub(crate) fn step(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>, fornax_compute::Error> {
        let len = u32::try_from(tokens.len()).unwrap();
        let pages = |group: &KvGroup| (1..u32::try_from(group.pages).unwrap()).map(PageId).collect();
        let row = Row {
            slot: 0,
            start: u32::try_from(self.computed).unwrap(),
            len,
            pages: self.groups.iter().map(pages).collect(),
            wanted: len,
        };
        let mut batch = Batch::default();
        batch.push(row, tokens.iter().map(|token| Token::Known(*token)));
        let step = self.backend.begin(&batch)?;
        self.model.forward(&self.backend, &mut self.kv, &step)?;
        let logits = self.backend.read(self.model.logits(), 0, tokens.len())?;
        self.backend.finish(step)?;
        self.computed += tokens.len();
        Ok(logits.chunks_exact(self.vocab).map(<[f32]>::to_vec).collect())
    }

    /// A prompt in one step, then one token at a time.
    pub(crate) fn talk(
        &mut self,
        prompt: &[u32],
        answer: &[u32],
    ) -> Result<Vec<Vec<f32>>, fornax_compute::Error> {
        let mut logits = self.step(prompt)?;
        for token in answer {
            logits.extend(self.step(&[*token])?);
        }
        Ok(logits)
    }
}

pub(crate) const PROMPT: &[u32] = &[3, 17, 99, 42, 7, 64, 120];
pub(crate) const ANSWER: &[u32] = &[5, 88, 13, 101];

pub(crate) fn bits(logits: &[Vec<f32>]) -> Vec<u32> {
    logits.iter().flatten().map(|logit| logit.to_bits()).collect()
}
