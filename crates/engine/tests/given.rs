//! What is given in place of tokens, and pages that move: on a real backend with a real (tiny) model.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::{path::Path, sync::Arc, time::Duration};

use fornax_compute::{
    Batch, Error, GivenRows, KvDType, KvSpec, Memory, PageId, Part, Row, Sampling, Token,
    cpu::{Cpu, CpuOptions, expand_rows},
};
use fornax_engine::{
    ContentHash, Engine, EngineOptions, Event, Local, LocalParts, Piece, Request, Runner, StepLimits, Turn,
};
use fornax_format::Checkpoint;
use fornax_model::{Config, Limits};

const TOKENS_MAX: usize = 64;

/// A runner, and the rows of the model's embedding.
fn local(fixture: &str) -> (Local<Cpu>, Vec<Vec<f32>>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(fixture);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let config = Config::read(&checkpoint).unwrap();
    let Checkpoint::HuggingFace(files) = &checkpoint else { panic!("a directory") };
    let table = files.weights().tensors().find(|view| view.name == "model.embed_tokens.weight").unwrap();
    let mut rows = Vec::new();
    expand_rows(&Part::from(table), |_, row| {
        rows.push(row.to_vec());
        Ok(())
    })
    .unwrap();
    let options =
        CpuOptions { threads: 2, tokens_max: TOKENS_MAX, slots: 2, depth: 0, ..CpuOptions::default() };
    let backend = Cpu::new(options).unwrap();
    let limits = Limits { tokens_max: TOKENS_MAX, wanted_max: 8 };
    let model = fornax_model::load(&checkpoint, &config, &backend, limits, &mut |_, _| {}).unwrap();
    let groups = config.kv_groups(16);
    let kv = backend.alloc_kv(&KvSpec { groups: groups.clone(), dtype: KvDType::F16 }).unwrap();
    let local = Local::new(LocalParts {
        backend,
        model,
        kv,
        groups,
        limits: StepLimits { tokens_max: TOKENS_MAX, wanted_max: 8, slots: 2 },
        depth: 0,
        vocab: u32::try_from(config.vocab).unwrap(),
    });
    (local.with_given(config.hidden), rows)
}

fn prompt() -> Vec<u32> {
    (0..100).map(|i| (i * 37 + 11) % 97).collect()
}

/// The tokens of an answer with the bits of their log-probabilities, and how much of the prompt was found.
fn answer(engine: &mut Engine, handle: &fornax_engine::Handle, request: Request) -> (Vec<(u32, u32)>, usize) {
    let mut reply = handle.submit(request).unwrap().remove(0);
    while engine.turn() == Turn::Worked {}
    let (mut tokens, mut cached) = (Vec::new(), 0);
    while let Some(event) = reply.try_recv() {
        match event {
            Event::Started { cached_tokens, .. } => cached = cached_tokens,
            Event::Token { token, logprob, .. } => tokens.push((token, logprob.unwrap().to_bits())),
            Event::End { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    (tokens, cached)
}

#[test]
fn a_tokens_own_row_in_its_place_has_the_tokens_bits_and_pages_of_its_own() {
    for fixture in ["llama", "gemma2"] {
        let (runner, rows) = local(fixture);
        let options = EngineOptions::new(200, Arc::new(|| Duration::ZERO));
        let (mut engine, handle) = Engine::new(Box::new(runner), options);
        let sampling = Sampling { top_logprobs: Some(0), ..Sampling::greedy() };
        let text = Request::new(prompt(), 20, sampling);
        let columns = rows[0].len();
        let piece = |hash, of: &dyn Fn(u32) -> usize| {
            let rows = prompt()[40..55].iter().flat_map(|&token| rows[of(token)].clone()).collect();
            Piece { at: 40, hash: ContentHash([hash; 16]), columns, rows, offsets: Vec::new(), whole: false }
        };
        // The placeholders are the same token; what is read there is what was said in the other prompt.
        let mut placeholders = prompt();
        placeholders[40..55].fill(3);
        let given = |piece| Request { prompt: placeholders.clone(), pieces: vec![piece], ..text.clone() };
        let (said, _) = answer(&mut engine, &handle, text.clone());
        assert_eq!(said.len(), 20);
        let own = piece(1, &|token| token as usize);
        let (same, cached) = answer(&mut engine, &handle, given(own.clone()));
        assert_eq!((same == said, cached), (true, 32), "{fixture}");
        let (other, cached) =
            answer(&mut engine, &handle, given(piece(2, &|token| (token as usize + 1) % 97)));
        assert_eq!(
            (other != said, cached),
            (true, 32),
            "{fixture}: another content shares what is before it"
        );
        assert_eq!(answer(&mut engine, &handle, given(own)), (said, 96), "{fixture}: the same content again");
    }
}

#[test]
fn given_rows_of_another_width_are_refused_by_the_backend_too() {
    let (mut local, rows) = local("llama");
    let table = vec![PageId(1)];
    let mut batch = Batch::default();
    batch.push(
        Row { slot: 0, start: 0, len: 2, pages: vec![table], wanted: 1 },
        [Token::Known(1), Token::Given(0)],
    );
    assert!(matches!(local.launch(&batch), Err(Error::BatchLimit { what: "given row", .. })));
    batch.given = GivenRows { columns: 3, values: vec![0.5; 3] };
    assert!(matches!(local.launch(&batch), Err(Error::OperandShape { operand: "given", .. })));
    batch.given = GivenRows { columns: rows[0].len(), values: rows[7].clone() };
    local.launch(&batch).unwrap();
    local.collect().unwrap();
    batch.sections = vec![vec![0, 1], vec![0]];
    let refused = local.launch(&batch);
    assert!(matches!(refused, Err(Error::BatchShape { what: "positions of a section", got: 1, wanted: 2 })));
}

#[test]
fn a_page_that_was_copied_out_and_in_yields_the_same_bits() {
    let (mut local, _) = local("llama");
    let hidden = |local: &mut Local<Cpu>, start: u32, end: u32, pages: [u32; 2]| {
        let mut batch = Batch::default();
        let pages = vec![pages.map(PageId).to_vec()];
        let row = Row { slot: 0, start, len: end - start, pages, wanted: 1 };
        batch.push(row, (start..end).map(|at| Token::Known((at * 37 + 11) % 97)));
        local.launch(&batch).unwrap();
        let hidden = local.hidden(&[0]).unwrap().remove(0);
        local.collect().unwrap();
        hidden.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
    };
    hidden(&mut local, 0, 40, [1, 2]);
    let copies = [1, 2].map(|page| local.copy_out(0, PageId(page)).unwrap());
    let wanted = hidden(&mut local, 40, 41, [1, 2]);
    assert_ne!(hidden(&mut local, 40, 41, [3, 4]), wanted, "nothing is there yet");
    for (page, copy) in [3, 4].into_iter().zip(&copies) {
        local.copy_in(0, PageId(page), copy).unwrap();
    }
    assert_eq!(hidden(&mut local, 40, 41, [3, 4]), wanted);
    // Another process with the same cache takes them too; one whose pages lie differently does not.
    let (mut second, _) = self::local("llama");
    for (page, copy) in [5, 6].into_iter().zip(&copies) {
        second.copy_in(0, PageId(page), copy).unwrap();
    }
    assert_eq!(hidden(&mut second, 40, 41, [5, 6]), wanted);
    let (mut other, _) = self::local("gemma2");
    assert!(matches!(other.copy_in(0, PageId(1), &copies[0]), Err(Error::PageCopy { .. })));
    assert!(matches!(second.copy_in(0, PageId(16), &copies[0]), Err(Error::BatchLimit { what: "page", .. })));
}
