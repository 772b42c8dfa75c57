//! Many requests, one model, nothing lost.
//!
//! The engine owns every sequence and every KV page, and drives one [`Runner`]. It is synchronous and runs on one
//! thread; the only shared state is the hand-over ([`Handle`] in, [`Reply`] out). It knows tokens as numbers. It must
//! never know text, files, sockets or the time of day: the clock is handed in.

mod adapters;
mod automaton;
mod budget;
mod drafting;
mod engine;
mod event;
pub mod fake;
mod grammar;
mod handle;
mod local;
mod pace;
mod pages;
mod picture;
mod plan;
mod prefix;
mod question;
mod reply;
mod request;
mod runner;
mod scheduler;
mod sequence;
mod shares;
pub mod simulation;
mod speculation;
mod stats;
mod sync;
mod tier;

use std::{sync::Arc, time::Duration};

pub use adapters::AdapterRefusal;
pub use engine::{Engine, EngineOptions, Turn};
pub use event::{EndReason, Event, Failure, Miss, Usage, of_length_one};
pub use grammar::{Constraint, Grammar, allows};
pub use handle::{Handle, QueueLimits};
pub use local::{Local, LocalParts};
pub use pages::PageCounts;
pub use picture::{PAGES_MAX, PageUse, Picture, Progress, REQUESTS_MAX};
pub use plan::{Ask, Change, DevicePlan, Plan, Planner, Remedy, Stored, stored_as};
pub use reply::{Reply, TimedOut};
pub use request::{CHOICES_MAX, Capacity, ContentHash, PRIORITY_PLACES, Piece, Refusal, Request};
pub use runner::Runner;
pub use scheduler::StepLimits;
pub use speculation::{Drafter, Speculation, look_up};
pub use stats::{DraftStats, Ended, Stats};
pub use tier::{Fetched, PageName, PathName, Tier, TierStats};

/// Time since an arbitrary start.
pub type Clock = Arc<dyn Fn() -> Duration + Send + Sync>;
