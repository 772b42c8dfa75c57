//! Durable jobs over HTTP, as RunPod's clients speak of them: an existing backend changes one address.

pub(crate) mod control;
pub(crate) mod durable;
pub(crate) mod model;
pub(crate) mod route;
pub(crate) mod run;
pub(crate) mod schemas;
pub(crate) mod status;
pub(crate) mod stream;
