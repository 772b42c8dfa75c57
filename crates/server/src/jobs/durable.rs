//! The jobs of a server: where they are kept, who works on them, and who asks.

use std::{sync::Arc, time::Duration};

use fornax_jobs::{
    Error, Failure, Job, Runner, RunnerOptions, Store, StoreOptions, WebhookOptions, Webhooks,
};
use tokio::{sync::watch, task::JoinHandle};

use super::model::Engine;
use crate::{
    app::App,
    error::{ApiError, Code, Fault, meaning},
    front::keys::Caller,
    models::Chosen,
    openai::batches::line,
    responses::memory::ended,
};

/// How durable jobs are kept, run and told of.
#[derive(Clone, Debug)]
pub struct JobsOptions {
    /// Where they are kept.
    pub store: StoreOptions,
    /// How they are run.
    pub runner: RunnerOptions,
    /// Who is told of their ends.
    pub webhooks: WebhookOptions,
}

/// Kept by the app as long as it runs.
pub(crate) struct Durable {
    pub(crate) store: Store,
    pub(crate) webhooks: Webhooks,
    options: JobsOptions,
}

impl Durable {
    pub(crate) async fn open(options: &JobsOptions) -> Result<Durable, Error> {
        let store = Store::open(options.store.clone()).await?;
        let webhooks = Webhooks::new(options.webhooks.clone());
        Ok(Durable { store, webhooks, options: options.clone() })
    }

    /// Begins to work on what waits for the models. A job loads its model as a request does.
    pub(crate) fn work(&self, app: &Arc<App>) -> Workers {
        let (stop, stopped) = watch::channel(false);
        let runner = |chosen: Chosen| {
            let (model, options) = (app.models.name(&chosen).to_owned(), self.options.runner.clone());
            let engine = Arc::new(Engine::new(Arc::clone(app), chosen));
            let runner = Runner::new(self.store.clone(), engine, model, options);
            tokio::spawn(runner.run(stopped.clone()))
        };
        let sender = Webhooks::new(self.options.webhooks.clone());
        Workers {
            runners: app.models.lasting_choices().into_iter().map(runner).collect(),
            sender: tokio::spawn(sender.run(self.store.clone(), stopped.clone())),
            settler: tokio::spawn(settle(self.store.clone(), stopped)),
            stop,
        }
    }
}

/// How often batches are looked at whose last request may have ended, and responses whose job may have.
const SETTLE: Duration = Duration::from_millis(500);

/// Writes down the answers of batches and responses that have ended.
async fn settle(store: Store, mut stop: watch::Receiver<bool>) {
    while !*stop.borrow() {
        if let Err(error) = store.settle_batches(line).await {
            tracing::error!(reason = error.to_string(), "cannot end the batches");
        }
        if let Err(error) = store.settle_responses(ended).await {
            tracing::error!(reason = error.to_string(), "cannot end the responses in the background");
        }
        tokio::select! {
            _ = stop.changed() => {}
            () = tokio::time::sleep(SETTLE) => {}
        }
    }
}

/// What works on jobs.
pub(crate) struct Workers {
    /// One for each model and each adapter that it is always loaded with.
    runners: Vec<JoinHandle<usize>>,
    sender: JoinHandle<()>,
    settler: JoinHandle<()>,
    stop: watch::Sender<bool>,
}

impl Workers {
    /// Takes no more jobs; those under way go on.
    pub(crate) fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Waits until all are finished or returned. Returns how many were returned.
    pub(crate) async fn stopped(self) -> usize {
        let mut returned = 0;
        for runner in self.runners {
            returned += runner.await.unwrap_or(0);
        }
        drop(self.sender.await);
        drop(self.settler.await);
        returned
    }
}

impl App {
    /// Where jobs are kept, or why there are none.
    pub(crate) fn durable(&self) -> Result<&Durable, ApiError> {
        let none =
            || ApiError::new(Code::UnknownEndpoint, "this server keeps no jobs; start it with --jobs-db");
        self.durable.get().ok_or_else(none)
    }

    /// The jobs and the model that an endpoint of theirs means, or why there are none.
    pub(crate) fn jobs_of(&self, endpoint: &str) -> Result<(&Durable, Chosen), ApiError> {
        let durable = self.durable()?;
        self.check_ready()?;
        let chosen = self.models.lasting((endpoint != "default").then_some(endpoint)).map_err(|_| {
            let lasting = self.models.lasting_choices();
            let names = lasting.iter().map(|chosen| format!("{:?}", self.models.name(chosen)));
            let names: Vec<String> = names.collect();
            let message = format!("there is no such endpoint; there are default and {}", names.join(", "));
            ApiError::new(Code::UnknownEndpoint, message)
        })?;
        Ok((durable, chosen))
    }

    /// The name that the jobs of a model are kept under.
    pub(crate) fn name_of<'a>(&'a self, chosen: &'a Chosen) -> &'a str {
        self.models.name(chosen)
    }

    /// A job of a model, for whoever submitted it: another's is as good as none.
    pub(crate) async fn job(
        &self,
        durable: &Durable,
        chosen: &Chosen,
        id: &str,
        caller: &Caller,
    ) -> Result<Job, ApiError> {
        let job = durable.store.get(id).await?;
        let job = job.filter(|job| job.model == self.name_of(chosen) && job.owner == *caller.key.owner);
        job.ok_or_else(|| Error::NotFound.into())
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> ApiError {
        let message = error.to_string();
        match error {
            Error::DiskFull => ApiError::new(Code::DiskFull, message),
            Error::QueueFull { .. } | Error::ShareFull { .. } | Error::BytesFull { .. } => {
                ApiError::new(Code::QueueFull, message)
            }
            Error::NotFound => ApiError::new(Code::JobNotFound, message),
            Error::KeyReused => ApiError::new(Code::KeyReused, message),
            Error::WrongState { .. } => ApiError::new(Code::WrongState, message),
            Error::SchemasFull { .. } => ApiError::new(Code::SchemasFull, message),
            Error::FilesFull { .. } => ApiError::new(Code::FilesFull, message),
            Error::BatchesFull { .. } => ApiError::new(Code::BatchesFull, message),
            Error::Open(_) | Error::InUse { .. } | Error::Database(_) => {
                // What databases say may hold what was asked.
                tracing::error!(reason = message, "the jobs database failed");
                ApiError::new(Code::Internal, "the jobs database failed")
            }
        }
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> ApiError {
        let errors = failure.diagnostics["errors"].as_array().cloned().unwrap_or_default();
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let faults =
            errors.iter().map(|error| Fault::rule(text(&error["field"]), text(&error["constraint"])));
        ApiError { faults: faults.collect(), ..ApiError::new(failure.code, failure.message) }
    }
}

impl ApiError {
    /// As what a job failed with.
    pub(crate) fn failure(self, stage: &'static str) -> Failure {
        let mut failure = Failure::new(self.code, stage, self.message);
        failure.retryable = meaning(self.code).retryable;
        failure.retry_after_s = self.retry_after_s;
        if !self.faults.is_empty() {
            let errors: Vec<_> = self.faults.iter().map(Fault::to_json).collect();
            failure.diagnostics["errors"] = errors.into();
        }
        failure
    }
}
