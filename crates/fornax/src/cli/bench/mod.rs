//! How fast a model runs here, measured through the engine and through a server, beside what this machine can do.

mod args;
mod load;
mod measured;
mod shapes;
mod threads;
mod wire;

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fornax::random_model::{self, SHAPES, Shape, Types};
use fornax::{Error, Fornax, OpenOptions};
use fornax_server::{Offer, Server, ServerOptions};
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};

use super::args::Threads;
use super::device::{self, DeviceArgs, Taken};
use super::failure::Failure;
use super::interrupt::Interrupt;
use super::meter::{Meter, megabytes};
use super::output::binary;
use super::{locate, output, serve};
pub(crate) use args::Bench;
use load::{Clients, Target};
use measured::{Figures, Http, Inside, Measured, Rates, Setup, Traffic};
use threads::Compared;
use wire::Wire;

/// What `--json` prints. Rates are tokens per second.
#[derive(Debug, Serialize)]
struct Report {
    model: PathBuf,
    #[serde(flatten)]
    device: DeviceReport,
    load: Load,
    #[serde(flatten)]
    figures: Figures,
}

/// Where it was measured, and what is possible there.
#[derive(Debug, Serialize)]
struct DeviceReport {
    device: String,
    threads: usize,
    /// Of those, the ones that compute a step of few tokens.
    threads_for_few: usize,
    activations: &'static str,
    kv_dtype: String,
    #[serde(flatten)]
    rates: Rates,
}

impl DeviceReport {
    fn of(model: &Fornax, args: &Bench, rates: Rates) -> DeviceReport {
        DeviceReport {
            device: model.kind().to_string(),
            threads: model.threads(),
            threads_for_few: model.threads_for_few(),
            activations: args.device.activations_on(model.kind()).name(),
            kv_dtype: model.kv_dtype().to_string(),
            rates,
        }
    }

    fn words(&self) -> String {
        let DeviceReport { device, threads, threads_for_few: few, activations, kv_dtype, rates } = self;
        let few = if few == threads {
            String::new()
        } else {
            format!(" ({few} of them for single tokens: faster here)")
        };
        let what = format!(
            "{device}, {threads} threads{few}, {activations} activations, keys and values in {kv_dtype}"
        );
        format!("{what}\n{}\n", rates.words())
    }
}

#[derive(Debug, Serialize)]
struct Load {
    seconds: f64,
    /// From the first weight to the last.
    weights_seconds: f64,
    file_bytes: u64,
    /// Of files, while weights were loaded.
    bytes_per_second: f64,
    allocated_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    upload_rate_percent: Option<f64>,
}

impl Load {
    fn of(taken: Taken, inside: &Inside<'_>) -> Load {
        let weights_seconds = taken.weights.as_secs_f64();
        let bytes_per_second = inside.traffic.file_bytes as f64 / weights_seconds.max(1e-9);
        let upload = inside.rates.upload_bytes_per_second;
        Load {
            seconds: taken.all.as_secs_f64(),
            weights_seconds,
            file_bytes: inside.traffic.file_bytes,
            bytes_per_second,
            allocated_bytes: inside.model.memory().allocated.total(),
            upload_rate_percent: upload.map(|rate| 100.0 * bytes_per_second / rate),
        }
    }

    fn words(&self) -> String {
        let (file, allocated) = (binary(self.file_bytes), binary(self.allocated_bytes));
        let share =
            self.upload_rate_percent.map_or(String::new(), |share| format!(", {share:.1} % of the rate"));
        format!(
            "loaded in {:.2} s (weights in {:.2} s: {:.1} GB/s{share}): {file} of files, {allocated} allocated\n",
            self.seconds,
            self.weights_seconds,
            self.bytes_per_second / 1e9
        )
    }
}

/// What `--json` prints of a server elsewhere.
#[derive(Debug, Serialize)]
struct HttpReport {
    url: String,
    model: String,
    #[serde(flatten)]
    http: Http,
}

pub(crate) fn bench(args: &Bench) -> anyhow::Result<()> {
    if let Some(shape) = &args.make_random {
        return make_random(args, shape);
    }
    let interrupt = Interrupt::install()?;
    let clients = Clients::new()?;
    if let Some(url) = args.http.as_deref().filter(|url| !url.is_empty()) {
        return elsewhere(args, url, &clients, &interrupt);
    }
    let setup = Setup::new(args, device::named(&args.device.device)?)?;
    if let Some(names) = &args.shapes {
        return shapes::shapes(args, names, &setup, &clients, &interrupt);
    }
    let path = locate::locate(args.model.as_deref())?;
    let measure = |args: &Bench| measure(&path, args, &setup, &clients, &interrupt);
    let counts = match &args.device.threads {
        Some(Threads::Counts(counts)) if counts.len() > 1 => counts,
        _ => {
            let report = measure(args)?;
            return if args.output.json { output::json(&report) } else { tell(&report.words()?) };
        }
    };
    let mut reports = Vec::new();
    for &count in counts {
        let args = &mut Bench {
            device: DeviceArgs { threads: Some(Threads::Counts(vec![count])), ..args.device.clone() },
            ..args.clone()
        };
        let report = measure(args)?;
        if !args.output.json {
            tell(&report.words()?)?;
        }
        reports.push(report);
    }
    let compared = Compared::new(reports);
    if args.output.json { output::json(&compared) } else { tell(&compared.table()?) }
}

fn tell(words: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(words.as_bytes())?;
    Ok(out.flush()?)
}

/// Opens one model and measures it.
fn measure(
    path: &Path,
    args: &Bench,
    setup: &Setup,
    clients: &Clients,
    interrupt: &Interrupt,
) -> anyhow::Result<Report> {
    let options = options(path, args, setup)?;
    let (model, taken) = device::open_timed(options)?;
    device::announce(model.device(), &args.device)?;
    let rates = Rates::measure(&model)?;
    let inside = Inside { model: &model, traffic: Traffic::of(path, &model)?, rates };
    let load = Load::of(taken, &inside);
    let figures = figures(args, setup, inside, clients, interrupt)?;
    Ok(Report { model: path.to_owned(), device: DeviceReport::of(&model, args, rates), load, figures })
}

impl Report {
    fn words(&self) -> Result<String, std::fmt::Error> {
        let mut out = String::new();
        writeln!(out, "{}", self.model.display())?;
        write!(out, "{}{}{}", self.device.words(), self.load.words(), self.figures.table()?)?;
        Ok(out)
    }
}

/// How the model is opened: with room for the longest conversation where there is that much, else for the others. What
/// does not fit is refused with its numbers.
fn options(path: &Path, args: &Bench, setup: &Setup) -> anyhow::Result<OpenOptions> {
    let open = |context: usize| -> anyhow::Result<OpenOptions> {
        let options = device::options(path, &args.device)?.context(context).drafts(false);
        Ok(options.parallel(setup.parallel()).queue(setup.queue()))
    };
    if let Some(context) = args.device.context {
        return fitting(open(context)?);
    }
    let trained = device::options(path, &args.device)?.memory_limit(u64::MAX).plan()?.plan.context_trained;
    let [long, short] = setup.contexts().map(|tokens| trained.min(tokens));
    let options = open(long)?;
    if options.plan()?.plan.fits() { Ok(options) } else { fitting(open(short)?) }
}

fn fitting(options: OpenOptions) -> anyhow::Result<OpenOptions> {
    let planned = options.plan()?;
    if planned.plan.fits() { Ok(options) } else { Err(planned.refusal().into()) }
}

/// Measures a model that is open, with a server in front of it where that is asked for.
fn figures(
    args: &Bench,
    setup: &Setup,
    inside: Inside<'_>,
    clients: &Clients,
    interrupt: &Interrupt,
) -> anyhow::Result<Figures> {
    let server = args.http.as_ref().map(|_| Beside::start(inside.model)).transpose()?;
    let target = server.as_ref().map(|server| Target::Server(Wire::new(server.address)));
    let (vocab, context) = (inside.model.text().vocab(), inside.model.context());
    // The last token may be one that ends.
    let vocab = vocab.saturating_sub(1).max(1);
    let measured = Measured { setup, interrupt, clients, vocab, context, inside: Some(inside) };
    let figures = interrupt.during(|| {
        let inside = measured.inside.as_ref().expect("just given");
        measured.figures(inside, target.as_ref())
    });
    if let Some(server) = server {
        server.stop()?;
    }
    figures
}

/// A server in this process, as `serve` would start it.
struct Beside {
    runtime: Runtime,
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    ended: oneshot::Receiver<Result<(), fornax_server::Error>>,
}

impl Beside {
    fn start(model: &Fornax) -> anyhow::Result<Beside> {
        if model.text().tokenizer().is_none() {
            let needed = "--http needs a model with a tokenizer; --shapes makes random ones that have one";
            return Err(Failure::usage(needed.to_owned()).into());
        }
        let runtime = serve::runtime()?;
        let shared = model.clone();
        let card = serve::card_named("bench");
        let offer = Offer {
            card: card.clone(),
            context: model.context(),
            preload: false,
            plan: Box::new(|_| Ok(())),
            load: Box::new(move |_, _| {
                serve::served(shared.clone(), card.clone(), (serde_json::Value::Null, 0), Instant::now())
                    .map_err(|error| serve::failed(&error))
            }),
        };
        let started = runtime.block_on(async {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            anyhow::Ok(Server::new(listener, ServerOptions::default(), vec![offer]).await?)
        });
        let server = started?;
        let address = server.address();
        let (stop, stopped) = oneshot::channel();
        let (tell, ended) = oneshot::channel();
        let (reload, asked) = mpsc::channel(1);
        runtime.spawn(async move {
            // Held, so that nobody is taken to have asked for keys to be read again.
            let _reload = reload;
            let ended = server.run(async { drop(stopped.await) }, asked).await;
            drop(tell.send(ended));
        });
        let beside = Beside { runtime, address, stop, ended };
        beside.wait_until_ready()?;
        Ok(beside)
    }

    fn wait_until_ready(&self) -> anyhow::Result<()> {
        let wire = Wire::new(self.address);
        self.runtime.block_on(async {
            loop {
                let health = wire.get("/health").await?;
                match health["status"].as_str() {
                    Some("ready") => return Ok(()),
                    Some("starting" | "loading") => tokio::time::sleep(Duration::from_millis(5)).await,
                    _ => {
                        return Err(Failure::new(
                            fornax::Code::Internal,
                            format!("the server is not ready: {health}"),
                        )
                        .into());
                    }
                }
            }
        })
    }

    fn stop(self) -> anyhow::Result<()> {
        let Beside { runtime, stop, ended, .. } = self;
        // One that has ended by itself hears nothing.
        stop.send(()).ok();
        let ended = runtime.block_on(ended);
        runtime.shutdown_timeout(Duration::from_secs(1));
        Ok(ended.unwrap_or(Ok(()))?)
    }
}

/// Measures a server that runs already.
fn elsewhere(args: &Bench, url: &str, clients: &Clients, interrupt: &Interrupt) -> anyhow::Result<()> {
    let (wire, health) = clients.runtime().block_on(async {
        let wire = Wire::find(url).await?;
        let health = wire.get("/health").await?;
        anyhow::Ok((wire, health))
    })?;
    let number = |name: &str| health[name].as_u64().and_then(|number| usize::try_from(number).ok());
    let (Some(vocab), Some(context)) = (number("vocab"), number("context")) else {
        return Err(Failure::usage(format!(
            "{url} does not say its vocabulary and context: is it a Fornax?"
        ))
        .into());
    };
    let setup = Setup::new(args, fornax::Device::Cpu)?;
    let vocab = vocab.saturating_sub(1).max(1);
    let measured = Measured { setup: &setup, interrupt, clients, vocab, context, inside: None };
    let http = interrupt.during(|| measured.http(&Target::Server(wire)))?;
    let model = health["model"].as_str().unwrap_or_default().to_owned();
    let report = HttpReport { url: url.to_owned(), model, http };
    if args.output.json {
        return output::json(&report);
    }
    writeln!(io::stdout().lock(), "{}, {}\n{}", report.url, report.model, report.http.table()?)?;
    Ok(())
}

/// A shape that random models are made in.
fn named_shape(flag: &str, name: &str) -> Result<&'static Shape, Failure> {
    SHAPES.iter().find(|known| known.name == name).ok_or_else(|| {
        let names = SHAPES.map(|shape| shape.name).join(", ");
        Failure::usage(format!("{flag} {name:?} is no shape; use one of {names}"))
    })
}

/// A type that they are made in.
fn named_types(flag: &str, name: &str) -> Result<Types, Failure> {
    Types::named(name).ok_or_else(|| {
        let names = Types::names().join(", ");
        Failure::usage(format!("{flag} {name:?} cannot be made; use one of {names}"))
    })
}

/// Writes a model of random weights.
fn make_random(args: &Bench, shape: &str) -> anyhow::Result<()> {
    let shape = named_shape("--make-random", shape)?;
    let quant = args.device.quant.as_deref().unwrap_or_default();
    let types = named_types("--quant", quant)?;
    let default = format!("{}-{}.gguf", shape.name, quant.to_lowercase());
    let path = PathBuf::from(args.model.as_ref().unwrap_or(&default));
    if path.exists() {
        return Err(
            Failure::usage(format!("{} exists; remove it or name another file", path.display())).into()
        );
    }
    let interrupt = Interrupt::install()?;
    let mut meter = Meter::new(Duration::from_secs(2));
    let written = interrupt.during(|| {
        random_model::write(&path, shape, types, args.seed, &mut |done, total| {
            meter.show("writing:", (done, total), &megabytes(done, total));
            if interrupt.asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    });
    drop(meter);
    match written {
        Ok(()) => {}
        Err(_) if interrupt.asked() => return Err(Error::Cancelled.into()),
        Err(error) => return Err(Failure::unwritable(&path, &error).into()),
    }
    writeln!(io::stdout(), "{}", path.display())?;
    Ok(())
}
