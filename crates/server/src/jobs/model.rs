//! The engine as jobs know it: questions go the way of the chat and completions routes.

use std::{sync::Arc, time::Instant};

use fornax_chat::{Ask, Finish, Piece, TokenScore, call_id};
use fornax_form::Form;
use fornax_jobs::{Answer, Body, Call, Failure, Finish as Ended, Model, Question, Timings, Token, Usage};
use fornax_text::Delta;
use serde_json::Value;

use crate::{
    app::{Admission, App},
    ask::prepare::{Preparing, on_a_thread},
    error::{ApiError, Code},
    models::{Chosen, Models},
    openai::{chat::ChatBody, completions::CompletionBody},
    served::Served,
    shape::{self, Unknown},
    work::Work,
};

/// Alternatives that are looked at to say how sure a choice is: as many as the routes tell.
const ALTERNATIVES: u32 = 20;

/// A model that answers questions of jobs, loaded when there are any.
pub(crate) struct Engine {
    app: Arc<App>,
    /// Which of the models.
    chosen: Chosen,
}

impl Engine {
    pub(crate) fn new(app: Arc<App>, chosen: Chosen) -> Engine {
        Engine { app, chosen }
    }
}

/// The question for the engine, by the rules of the route that its body belongs to. May block.
pub(crate) fn ask(question: &Question, served: &Preparing<'_>) -> Result<Ask, ApiError> {
    let schema = question.schema.as_deref();
    let form = schema.map(|schema| {
        (Form::JsonSchema(schema.value().clone()), schema.has_choices().then_some(ALTERNATIVES))
    });
    match &question.body {
        Body::Chat(body) => {
            let body = shape::understand::<ChatBody>(body.clone(), Unknown::Refuse)?;
            Ok(body.ask_with(served, form)?.0)
        }
        Body::Completion(body) => {
            let body = shape::understand::<CompletionBody>(body.clone(), Unknown::Refuse)?;
            let (mut asks, _) = body.ask_with(served, form)?;
            let only = asks.pop().filter(|_| asks.is_empty());
            only.ok_or_else(|| Failure::input("input.prompt", "must be one prompt").into())
        }
    }
}

impl Models {
    /// Refuses a question that names another model than its job's endpoint did.
    pub(crate) fn check_model(&self, question: &Question, chosen: &Chosen) -> Result<(), ApiError> {
        let (Body::Chat(body) | Body::Completion(body)) = &question.body;
        match body["model"].as_str() {
            Some(name) if self.named(Some(name))? != *chosen => {
                let message = format!("the job is one of {:?}", self.name(chosen));
                Err(ApiError::new(Code::ModelNotFound, message))
            }
            _ => Ok(()),
        }
    }
}

impl Engine {
    /// Lets a job in to its model, once there is room for it.
    async fn admitted(&self, owner: &str) -> Result<Admission, ApiError> {
        loop {
            // Before asking, so that no room made meanwhile is missed.
            let idle = self.app.models.idle();
            match self.app.enter_job(owner).admit(self.chosen.clone()).await {
                // A job can wait until others are done; whoever runs it bounds that.
                Err(error) if error.code == Code::ModelDoesNotFit => idle.await,
                admitted => return admitted,
            }
        }
    }
}

impl Model for Engine {
    fn facts(&self) -> (String, String) {
        let models = &self.app.models;
        (models.name(&self.chosen).to_owned(), models.all()[self.chosen.index].offer.card.quant.clone())
    }

    async fn answer(
        &self,
        owner: &str,
        question: Question,
        hears: impl Fn(&str) + Send + Sync,
    ) -> Result<Answer, Failure> {
        let admission = self.admitted(owner).await.map_err(|error| error.failure("load"))?;
        let asked = self.app.models.check_model(&question, &self.chosen);
        asked.map_err(|error| error.failure("prepare"))?;
        let tenant = admission.tenant().clone();
        let prepared =
            on_a_thread(&self.app, &tenant, &admission.served, move |served| ask(&question, served)).await;
        let ask = prepared.map_err(|error| error.failure("prepare"))?;
        let seed = ask.request.seed;
        let began = Instant::now();
        let mut work = Work::submit(admission, vec![ask]).map_err(|error| error.failure("generate"))?;
        let mut answer = Answer { seed, ..Answer::default() };
        let (mut started, mut first) = (None, None);
        while let Some((_, piece)) = work.next().await {
            let piece = piece.map_err(|error| {
                work.failed_midway(&error);
                error.failure("generate")
            })?;
            match piece {
                Piece::Started { .. } => started = Some(Instant::now()),
                Piece::Scored(_) | Piece::Token(_) | Piece::Embedding(_) => {}
                Piece::Said { deltas, tokens } => {
                    first.get_or_insert_with(Instant::now);
                    deltas.into_iter().for_each(|delta| take(&mut answer, delta, &hears));
                    answer.tokens.extend(tokens.iter().map(|score| token(work.served(), score)));
                }
                Piece::Text { text, tokens } => {
                    first.get_or_insert_with(Instant::now);
                    hears(&text);
                    answer.text.push_str(&text);
                    answer.tokens.extend(tokens.iter().map(|score| token(work.served(), score)));
                }
                Piece::End { finish, usage } => {
                    answer.finish = match finish {
                        Finish::End | Finish::Stop(_) => Ended::Stop,
                        Finish::Length => Ended::Length,
                        Finish::Truncated | Finish::Cut(_) => Ended::Truncated,
                        Finish::Cancelled => {
                            return Err(Failure::retryable(
                                Code::Cancelled,
                                "generate",
                                "the engine stopped",
                            ));
                        }
                    };
                    answer.usage =
                        Usage { prompt: usage.prompt, cached: usage.cached, completion: usage.generated };
                }
            }
        }
        let (started, ended) = (started.unwrap_or(began), Instant::now());
        let first = first.unwrap_or(ended);
        let milliseconds =
            |from: Instant, to: Instant| u64::try_from((to - from).as_millis()).unwrap_or(u64::MAX);
        answer.timings = Timings {
            queue: milliseconds(began, started),
            prefill: milliseconds(started, first),
            decode: milliseconds(first, ended),
        };
        Ok(answer)
    }

    async fn respond(&self, owner: &str, route: &str, body: Value) -> Result<Value, Failure> {
        let route = App::route(route).map_err(|error| error.failure("prepare"))?;
        let admission = self.admitted(owner).await.map_err(|error| error.failure("load"))?;
        let answered = route.respond(&self.app, admission, owner, body).await;
        answered.map_err(|error| error.failure("generate"))
    }
}

/// Adds a part to an answer. What is said is heard as it comes.
fn take(answer: &mut Answer, delta: Delta, hears: &impl Fn(&str)) {
    match delta {
        Delta::Reasoning(text) => {
            // Nothing is said yet, and that it is alive is worth knowing.
            hears("");
            answer.reasoning.push_str(&text);
        }
        Delta::Content(text) => {
            hears(&text);
            answer.text.push_str(&text);
        }
        Delta::Call { name, .. } => {
            answer.calls.push(Call { id: call_id(), name, arguments: String::new() });
        }
        Delta::Arguments { index, text } => answer.calls[index].arguments.push_str(&text),
    }
}

fn token(served: &Served, score: &TokenScore) -> Token {
    let bytes = |token: u32| served.tokenizer.token_bytes(token).to_vec();
    let top = score.top.iter().map(|&(token, logprob)| (bytes(token), logprob)).collect();
    Token { bytes: bytes(score.token), logprob: score.logprob, top }
}
