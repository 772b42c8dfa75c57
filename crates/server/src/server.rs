//! The life of a server: listen, load, prove, serve, drain.

use std::{future::Future, io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use axum::Router;
use fornax_compute::Sampling;
use fornax_engine::{Event, Request};
use fornax_text::Special;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::{Semaphore, mpsc, watch},
    task::JoinSet,
};

use crate::{
    app::{App, Failed, Phase, Progress},
    front::keys::{Keys, KeysError},
    jobs::durable::Durable,
    openapi::router,
    options::ServerOptions,
    served::Served,
    tls::{Tls, TlsError},
    worker::callback,
};

/// Headers of one request: more is a flood.
const HEADERS_MAX: usize = 100;

/// Bytes of a request's headers, and of what is read ahead of a body.
const HEADER_BYTES_MAX: usize = 64 << 10;

/// Tokens of the self-test: one from the prompt, one from what was generated.
const SELF_TEST_TOKENS: usize = 2;

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

/// What tells a running server what to do.
pub struct Controls {
    /// Loading, as it goes on.
    pub progress: watch::Receiver<Progress>,
    /// Keys and certificates are to be read again.
    pub reload: mpsc::Receiver<()>,
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
    pub async fn new(listener: TcpListener, mut options: ServerOptions) -> Result<Server, Error> {
        let address = listener.local_addr()?;
        let keys = Keys::open(options.api_key_file.as_deref(), options.per_key_max)?;
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
        let app = App::new(options, keys);
        if let Some(options) = &app.options.jobs {
            drop(app.durable.set(Durable::open(options).await?));
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

    /// Answers from the first moment (health, progress), serves once the model is loaded and has passed its test, and
    /// drains when `stop` resolves. Whatever cannot be loaded ends it with an error.
    pub async fn run(
        self,
        load: impl Future<Output = Result<Served, Failed>>,
        stop: impl Future<Output = ()>,
        controls: Controls,
    ) -> Result<(), Error> {
        let Server { app, listener, address, tls } = self;
        let (close, closed) = watch::channel(false);
        let accepting = tokio::spawn(accept(listener, router(&app), tls.clone(), Arc::clone(&app), closed));
        let reloading = tokio::spawn(reload(Arc::clone(&app), tls.clone(), controls.reload));

        let mut stop = pin!(stop);
        let loaded = tokio::select! {
            loaded = load_and_test(&app, load, controls.progress) => Some(loaded),
            () = &mut stop => None,
        };
        let outcome = match loaded {
            Some(Ok(served)) => {
                let tls = tls.is_some();
                if let Some(callback) = app.options.callback.clone() {
                    let message = callback::message(&callback, address, tls, &served);
                    // Blocking, and nobody waits for it: a scheduler that cannot be reached finds us by itself.
                    std::thread::spawn(move || callback::call(&callback, &message));
                }
                let workers = app.durable.get().map(|durable| durable.work(&app, &served));
                drop(served);
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
        // It would hold the model.
        reloading.abort();
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

async fn load_and_test(
    app: &Arc<App>,
    load: impl Future<Output = Result<Served, Failed>>,
    mut progress: watch::Receiver<Progress>,
) -> Result<Arc<Served>, Failed> {
    let mut load = pin!(load);
    let loaded = loop {
        tokio::select! {
            biased;
            loaded = &mut load => break loaded,
            Ok(()) = progress.changed() => {
                let progress = progress.borrow_and_update().clone();
                app.set_phase(Phase::Loading(progress));
            }
        }
    };
    let tested = match loaded {
        Ok(served) => {
            let stage = "self-test".to_owned();
            app.set_phase(Phase::Loading(Progress { stage, ..Progress::default() }));
            self_test(&served).await.map(|()| Arc::new(served))
        }
        Err(failed) => Err(failed),
    };
    match tested {
        Ok(served) => {
            app.set_phase(Phase::Ready(Arc::clone(&served)));
            tracing::info!(model = served.card.name, seconds = served.load_seconds, "ready");
            Ok(served)
        }
        Err(failed) => {
            tracing::error!(code = failed.code, reason = failed.message, "failed");
            app.set_phase(Phase::Failed(failed.clone()));
            Err(failed)
        }
    }
}

/// A generation of our own: what cannot answer this is not ready.
async fn self_test(served: &Served) -> Result<(), Failed> {
    let fail = |code: &str, message: String| Failed { code: code.to_owned(), message };
    let prompt = served.tokenizer.encode_prompt("Hello", Special::AsText);
    let prompt = prompt.map_err(|error| fail("INTERNAL", error.to_string()))?;
    let mut replies = served
        .engine
        .submit(Request::new(prompt, SELF_TEST_TOKENS, Sampling::greedy()))
        .map_err(|refusal| fail("INTERNAL", format!("the self-test was refused: {refusal}")))?;
    for reply in &mut replies {
        while let Some(event) = reply.next().await {
            if let Event::Failed(failure) = event {
                let message = failure.to_string();
                let (code, message) = message.split_once(": ").unwrap_or(("INTERNAL", &message));
                return Err(fail(code, format!("the self-test failed: {message}")));
            }
        }
    }
    Ok(())
}

async fn reload(app: Arc<App>, tls: Option<Arc<Tls>>, mut asked: mpsc::Receiver<()>) {
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
    let seats = Arc::new(Semaphore::new(app.options.connections_max));
    let mut connections = JoinSet::new();
    loop {
        let next = async {
            let seat = Arc::clone(&seats).acquire_owned().await;
            listener.accept().await.map(|(stream, _)| (stream, seat))
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
        connections.spawn(async move {
            let _seat = seat;
            match acceptor {
                None => serve(stream, router, patience, closed).await,
                Some(acceptor) => {
                    if let Ok(Ok(stream)) = tokio::time::timeout(patience, acceptor.accept(stream)).await {
                        serve(stream, router, patience, closed).await;
                    }
                }
            }
        });
    }
    drop(listener);
    // All work is done by now; what is left are last bytes on their way to clients that read slowly.
    let last_bytes = async { while connections.join_next().await.is_some() {} };
    drop(tokio::time::timeout(LAST_BYTES_TIMEOUT, last_bytes).await);
}

async fn serve<S>(stream: S, router: Router, patience: Duration, mut closed: watch::Receiver<bool>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(patience)
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEADER_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    // A connection that breaks is the client's business; its request was cancelled by being dropped.
    let is_closed = async { drop(closed.wait_for(|closed| *closed).await) };
    tokio::select! {
        ended = connection.as_mut() => return drop(ended),
        () = is_closed => connection.as_mut().graceful_shutdown(),
    }
    drop(connection.await);
}
