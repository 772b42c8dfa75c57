//! Durable jobs: documents in, valid JSON out, nothing lost.
//!
//! [`Store`] has jobs on disk before anybody is told. A [`Runner`] takes them, has them answered by a model that it is
//! handed ([`Model`]), lets a second implementation judge every answer, and writes what became of them. [`Webhooks`]
//! tell those who wait.
//!
//! This crate knows what a job is and when it is done. It must never know HTTP routes, a tokenizer or an engine:
//! whoever serves hands it a model that answers questions. It never writes what was asked or answered into a log.

mod batch;
mod clock;
mod confidence;
mod conversation;
mod error;
mod failure;
mod file;
mod input;
mod job;
mod made;
mod model;
mod response;
mod runner;
mod store;
mod submit;
mod webhooks;

pub use batch::{BATCH_REQUESTS_MAX, Batch, BatchAnswer, BatchRequest, BatchState, NewBatch};
pub use error::Error;
pub use failure::Failure;
pub use file::{NewFile, Page, StoredFile};
pub use input::{ITEMS_MAX, Input, Item, schema_name, set_schema};
pub use job::{Counts, Job, NewJob, Policy, State, TimelineEvent};
pub use model::{Answer, Body, Call, Finish, Model, Question, Timings, Token, Usage};
pub use response::{Conversation, EndedResponse, NewResponse, ResponseItem, StoredResponse};
pub use runner::{Runner, RunnerOptions};
pub use store::{Chunk, Claim, Delivery, Outcome, Store, StoreOptions};
pub use submit::Submitted;
pub use webhooks::{WebhookOptions, Webhooks, deliver, signature};
