//! A GPU that is lost amid requests: a kernel that traps breaks the context in which the model runs, as a fault of the
//! card does. Every request ends with DEVICE_LOST, the next is refused with it, and closing the model returns. `cargo
//! run --release -p fornax --example lost -- MODEL cuda:N [KERNEL_FOLDER]`
#![expect(clippy::print_stdout, reason = "a proof prints its figures")]
#![expect(unsafe_code, reason = "launching a kernel has no safe interface")]

use std::ops::ControlFlow;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use cudarc::driver::{CudaContext, LaunchConfig};
use cudarc::nvrtc::Ptx;
use fornax::{Code, Device, OpenOptions, Request, Sampling};

const REQUESTS: usize = 8;
/// Requests end with the device or not at all: nobody answers so much before it is lost.
const MAX_TOKENS: usize = 1900;
/// From the kernel's end to the last request's.
const WITHIN: Duration = Duration::from_secs(5);
const TRAP: &str = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry lose() { trap; }\n";

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, device, rest @ ..] = &arguments[..] else { bail!("lost MODEL cuda:N [KERNEL_FOLDER]") };
    let ordinal = device.strip_prefix("cuda:").context("only a GPU can be lost")?.parse()?;
    let mut options = OpenOptions::new(path).device(Device::Cuda(ordinal)).context(2048).parallel(REQUESTS);
    if let Some(folder) = rest.first() {
        options = options.kernel_folder(folder);
    }
    let model = options.open()?;
    let request = Request {
        sampling: Sampling { temperature: 1.0, ..Sampling::greedy() },
        max_tokens: Some(MAX_TOKENS),
        ignore_eos: true,
        ..Request::text("Once upon a time there was a small ship that")
    };
    let (begun, beginnings) = mpsc::channel();
    let (lost, ended) = std::thread::scope(|scope| -> Result<_> {
        let answer = |seed: usize, mut begun: Option<mpsc::Sender<()>>| {
            let request = Request { seed: Some(seed as u64), ..request.clone() };
            let answered = model.stream(&request, |_| {
                if let Some(begun) = begun.take() {
                    begun.send(()).expect("somebody waits");
                }
                ControlFlow::Continue(())
            });
            (answered, Instant::now())
        };
        let answers: Vec<_> = (0..REQUESTS)
            .map(|seed| (seed, begun.clone()))
            .map(|(seed, begun)| scope.spawn(move || answer(seed, Some(begun))))
            .collect();
        drop(begun);
        for _ in 0..REQUESTS {
            beginnings.recv().context("a request ended before it began")?;
        }
        let lost = break_device(ordinal)?;
        let ended = answers.into_iter().map(|answer| answer.join().expect("no thread panics"));
        Ok((lost, ended.collect::<Vec<_>>()))
    })?;
    for (request, (answered, at)) in ended.iter().enumerate() {
        let error = match answered {
            Err(error) => error,
            Ok(completion) => bail!("request {request} ended well, after {} tokens", completion.tokens.len()),
        };
        println!("request {request}: {}: {error}", error.code());
        ensure!(error.code() == Code::DeviceLost, "request {request} does not tell that the device is lost");
        ensure!(at.saturating_duration_since(lost) < WITHIN, "request {request} waited");
    }
    match model.generate(&request) {
        Err(error) if error.code() == Code::DeviceLost => {
            println!("the next request: {}: {error}", error.code())
        }
        other => bail!("the next request: {other:?}"),
    }
    println!("engine: {:?}", model.stats());
    drop(model);
    println!(
        "{REQUESTS} requests amid answers ended with DEVICE_LOST, the next was refused, and the model closed"
    );
    Ok(())
}

/// Ends when the device has.
fn break_device(ordinal: usize) -> Result<Instant> {
    // The device's primary context, in which the model runs, too.
    let context = CudaContext::new(ordinal)?;
    let kernel = context.load_module(Ptx::from_src(TRAP))?.load_function("lose")?;
    let stream = context.new_stream()?;
    let one = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the kernel has no parameters and touches no memory.
    unsafe { stream.launch_builder(&kernel).launch(one) }?;
    let broken = stream.synchronize();
    ensure!(broken.is_err(), "the device is as before");
    Ok(Instant::now())
}
