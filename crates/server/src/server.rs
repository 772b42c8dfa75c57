//! The life of a server: listen, load, prove, serve, drain.

use std::{future::Future, io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use axum::{Router, http::Request};
use hyper::{
    body::Incoming,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch},
    task::JoinSet,
};

use crate::{
    app::{App, Failed, Phase, Progress},
    front::{
        door::Place,
        keys::{Keys, KeysError, Rights},
        silent::{Answer, Guest, Silent},
        stalled::Impatient,
        told::Room,
    },
    jobs::durable::Durable,
    made::MadeModel,
    models::{Chosen, Offer, Slot, State},
    openapi::router,
    options::ServerOptions,
    tls::{Tls, TlsError},
    worker::callback,
};

/// Headers of one request: more is a flood.
const HEADERS_MAX: usize = 100;

/// Bytes of a request's headers, and of what is read ahead of a body.
const HEADER_BYTES_MAX: usize = 64 << 10;

/// How long a client may take for what was written before the server closes.
const LAST_BYTES_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the last spans may take to reach their collector.
const LAST_SPANS_TIMEOUT: Duration = Duration::from_secs(3);

/// Why a server cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its keys.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// Its certificate.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Everybody could use it.
    #[error(
        "{address} can be reached from other machines: give keys with --api-key-file, or listen on 127.0.0.1"
    )]
    KeyNeeded {
        /// Where it would listen.
        address: SocketAddr,
    },
    /// An origin that browsers never send.
    #[error("{origin:?} is no origin; one looks like https://app.example or http://localhost:3000")]
    Origin {
        /// As given.
        origin: String,
    },
    /// An address that nothing can be sent to.
    #[error("{url:?} is no address for --{flag}; one looks like http://127.0.0.1:4318")]
    Url {
        /// The flag that it was given with.
        flag: &'static str,
        /// As given.
        url: String,
    },
    /// The socket.
    #[error("cannot listen: {0}")]
    Listen(#[from] io::Error),
    /// The jobs cannot be kept.
    #[error(transparent)]
    Jobs(#[from] fornax_jobs::Error),
    /// The model could not be loaded, or failed its test.
    #[error(transparent)]
    Failed(#[from] Failed),
}

/// A server that listens and has not begun to answer.
pub struct Server {
    app: Arc<App>,
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<Arc<Tls>>,
}

impl Server {
    /// Takes over a listener and checks everything that can be wrong before a model is loaded.
    pub async fn new(
        listener: TcpListener,
        mut options: ServerOptions,
        offers: Vec<Offer>,
    ) -> Result<Server, Error> {
        let address = listener.local_addr()?;
        let rights =
            Rights { requests_max: options.per_key_max, urgent: options.priority_open, ..Rights::default() };
        let keys = Keys::open(options.api_key_file.as_deref(), rights)?;
        if !address.ip().is_loopback() && !keys.are_needed() {
            return Err(Error::KeyNeeded { address });
        }
        if let Some(origin) = options.cors_origins.iter().find(|origin| !is_origin(origin)) {
            return Err(Error::Origin { origin: origin.clone() });
        }
        let urls =
            [("otlp", options.otlp.as_ref()), ("callback-url", options.callback.as_ref().map(|to| &to.url))];
        for (flag, url) in urls {
            if let Some(url) = url.filter(|url| !is_url(url)) {
                return Err(Error::Url { flag, url: url.clone() });
            }
        }
        let tls = options.tls.take().map(Tls::open).transpose()?.map(Arc::new);
        let app = App::new(options, keys, offers);
        if let Some(options) = &app.options.jobs {
            let durable = Durable::open(options).await?;
            for (name, told) in durable.store.made().await? {
                match serde_json::from_value(told).map_err(|error| error.to_string()) {
                    Ok(told) => match MadeModel::new(told) {
                        Ok(made) => app.models.add_made(made),
                        Err(error) => tracing::warn!(model = name, reason = error.message, "cannot be read"),
                    },
                    Err(reason) => tracing::warn!(model = name, reason, "cannot be read"),
                }
            }
            drop(app.durable.set(durable));
        }
        Ok(Server { app, listener, address, tls })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether it speaks TLS.
    pub fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Answers from the first moment (health, progress), serves once the models of the start are loaded and have passed
    /// their test, and drains when `stop` resolves; keys and certificates are read again whenever `reload` says so. What
    /// cannot be loaded at the start ends it with an error; what cannot be loaded later fails who asked for it.
    pub async fn run(self, stop: impl Future<Output = ()>, reload: mpsc::Receiver<()>) -> Result<(), Error> {
        let Server { app, listener, address, tls } = self;
        let (close, closed) = watch::channel(false);
        let accepting = tokio::spawn(accept(listener, router(&app), tls.clone(), Arc::clone(&app), closed));
        let reloading = tokio::spawn(read_again(Arc::clone(&app), tls.clone(), reload));
        let retiring = app.options.idle_unload.map(|idle| tokio::spawn(Arc::clone(&app.models).retire(idle)));

        let mut stop = pin!(stop);
        let loaded = tokio::select! {
            loaded = load_first(&app) => Some(loaded),
            () = &mut stop => None,
        };
        let outcome = match loaded {
            Some(Ok(())) => {
                let tls = tls.is_some();
                let first = app.models.default().loaded();
                if let Some((callback, served)) = app.options.callback.clone().zip(first) {
                    let message = callback::message(&callback, address, tls, &served);
                    // Blocking, and nobody waits for it: a scheduler that cannot be reached finds us by itself.
                    std::thread::spawn(move || callback::call(&callback, &message));
                }
                let workers = app.durable.get().map(|durable| durable.work(&app));
                stop.await;
                Ok(workers)
            }
            Some(Err(failed)) => Err(Error::Failed(failed)),
            None => Ok(None),
        };
        tracing::info!("draining");
        let (workers, outcome) = match outcome {
            Ok(workers) => (workers, Ok(())),
            Err(error) => (None, Err(error)),
        };
        if let Some(workers) = &workers {
            workers.stop();
        }
        let left = app.drain().await;
        if let Some(workers) = workers {
            let returned = workers.stopped().await;
            tracing::info!(returned, "jobs are finished or returned");
        }
        if let Some(durable) = app.durable.get() {
            durable.store.close().await;
        }
        tracing::info!(left, "drained");
        close.send_replace(true);
        drop(accepting.await);
        for task in [Some(reloading), retiring].into_iter().flatten() {
            task.abort();
        }
        app.models.close().await;
        if let Some(traces) = app.traces.clone() {
            drop(tokio::task::spawn_blocking(move || traces.flush(LAST_SPANS_TIMEOUT)).await);
        }
        outcome
    }
}

fn is_origin(origin: &str) -> bool {
    let rest = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    rest.is_some_and(|rest| {
        !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/')
    })
}

fn is_url(url: &str) -> bool {
    url.parse::<axum::http::Uri>().is_ok_and(|uri| {
        matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some_and(|host| !host.is_empty())
    })
}

/// Loads the models of the start, one after the other.
async fn load_first(app: &Arc<App>) -> Result<(), Failed> {
    let first = |(index, slot): &(usize, &Slot)| *index == 0 || slot.offer.preload;
    // Held until all are there: none of them makes way for another.
    let mut leases = Vec::new();
    for (index, slot) in app.models.all().iter().enumerate().filter(first) {
        let mut states = slot.watch();
        let mut lease = pin!(app.models.lease(Chosen::model(index)));
        let leased = loop {
            tokio::select! {
                biased;
                leased = &mut lease => break leased,
                Ok(()) = states.changed() => {
                    let progress = match &*states.borrow_and_update() {
                        State::Loading(progress) if *progress != Progress::default() => progress.clone(),
                        _ => continue,
                    };
                    app.set_phase(Phase::Loading(progress));
                }
            }
        };
        match leased {
            Ok(lease) => leases.push(lease),
            Err(failed) => {
                app.set_phase(Phase::Failed(failed.clone()));
                return Err(failed);
            }
        }
    }
    app.set_phase(Phase::Ready);
    Ok(())
}

async fn read_again(app: Arc<App>, tls: Option<Arc<Tls>>, mut asked: mpsc::Receiver<()>) {
    while asked.recv().await.is_some() {
        let (app, tls) = (Arc::clone(&app), tls.clone());
        let done = tokio::task::spawn_blocking(move || {
            match app.keys.reload() {
                Ok(keys) => tracing::info!(keys, "keys were read again"),
                Err(error) => tracing::error!(reason = error.to_string(), "the old keys stay"),
            }
            match tls.map(|tls| tls.reload()) {
                Some(Err(error)) => tracing::error!(reason = error.to_string(), "the old certificate stays"),
                Some(Ok(())) => tracing::info!("the certificate was read again"),
                None => {}
            }
        });
        drop(done.await);
    }
}

/// Accepts connections until `closed`, then lets each finish the response it is in.
async fn accept(
    listener: TcpListener,
    router: Router,
    tls: Option<Arc<Tls>>,
    app: Arc<App>,
    mut closed: watch::Receiver<bool>,
) {
    let (seats, silent) = (Arc::new(Semaphore::new(app.options.connections_max)), Arc::<Silent>::default());
    let mut connections = JoinSet::new();
    loop {
        let next = async {
            let (stream, _) = listener.accept().await?;
            Ok::<_, io::Error>((stream, seat(&seats, &silent).await))
        };
        let accepted = tokio::select! {
            _ = closed.wait_for(|closed| *closed) => break,
            accepted = next => accepted,
        };
        // Tasks that have ended leave nothing behind.
        while connections.try_join_next().is_some() {}
        let (stream, seat) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, most likely: others will be closed.
                tracing::warn!(reason = error.to_string(), "cannot accept");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // Tokens are small and wanted at once. A socket that refuses this is served all the same.
        drop(stream.set_nodelay(true));
        let (router, closed) = (router.clone(), closed.clone());
        let (acceptor, patience) = (tls.as_ref().map(|tls| tls.acceptor()), app.options.read_timeout);
        let write_timeout = app.options.write_timeout;
        let guest = silent.welcome();
        connections.spawn(async move {
            let _seat = seat;
            let served = async {
                match acceptor {
                    None => {
                        let stream = Impatient::new(stream, write_timeout);
                        serve(stream, router, &guest, patience, closed).await;
                    }
                    Some(acceptor) => {
                        if let Ok(Ok(stream)) = tokio::time::timeout(patience, acceptor.accept(stream)).await
                        {
                            let stream = Impatient::new(stream, write_timeout);
                            serve(stream, router, &guest, patience, closed).await;
                        }
                    }
                }
            };
            tokio::select! {
                () = served => {}
                () = guest.ended() => {}
            }
        });
    }
    drop(listener);
    // All work is done by now; what is left are last bytes on their way to clients that read slowly.
    let last_bytes = async { while connections.join_next().await.is_some() {} };
    drop(tokio::time::timeout(LAST_BYTES_TIMEOUT, last_bytes).await);
}

/// How long a connection that makes room may take to be gone, before another one has to make room, too.
const LEAVING: Duration = Duration::from_millis(10);

/// A place for a connection. Where there is none, those that have been silent for the longest make room.
async fn seat(seats: &Arc<Semaphore>, silent: &Silent) -> Option<OwnedSemaphorePermit> {
    loop {
        match Arc::clone(seats).try_acquire_owned() {
            Ok(seat) => return Some(seat),
            Err(_) => silent.end_longest(),
        }
        if let Ok(seat) = tokio::time::timeout(LEAVING, Arc::clone(seats).acquire_owned()).await {
            return seat.ok();
        }
    }
}

async fn serve<S>(
    stream: S,
    router: Router,
    guest: &Arc<Guest>,
    patience: Duration,
    mut closed: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let router = TowerToHyperService::new(router);
    let answering = service_fn(|request: Request<Incoming>| {
        let (asking, answer) = (guest.asks(), router.call(request));
        async move {
            answer.await.map(|mut answer| {
                let extensions = answer.extensions_mut();
                let (place, room) = (extensions.remove::<Place>(), extensions.remove::<Room>());
                answer.map(|body| Answer::new(body, asking, place, room))
            })
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(patience)
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEADER_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), answering);
    let mut connection = pin!(connection);
    // A connection that breaks is the client's business; its request was cancelled by being dropped.
    let is_closed = async { drop(closed.wait_for(|closed| *closed).await) };
    tokio::select! {
        ended = connection.as_mut() => return drop(ended),
        () = is_closed => connection.as_mut().graceful_shutdown(),
    }
    drop(connection.await);
}
