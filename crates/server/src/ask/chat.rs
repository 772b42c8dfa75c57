//! A chat, whichever API asks for it.

use std::sync::Arc;

use fornax_chat::{
    Ask, Bounds, Choice, Definition, Error, Model, Place, Prepared, Question, ToolField, Tools, Unseen,
};

use super::{
    params::{Params, Wanted},
    prepare::{Preparing, check_length},
};
use crate::{
    error::{ApiError, Code, Fault},
    served::Served,
};

/// What a chat asks for, read from a body.
pub(crate) struct ChatAsk<'a> {
    pub(crate) question: Question,
    pub(crate) params: &'a Params,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) top_logprobs: Option<u32>,
    /// Only the length of the prompt is wanted: nobody looks at its pictures.
    pub(crate) counts: bool,
    pub(crate) names: &'static Names,
}

/// What an API calls the parts of a question, so that its clients find what is wrong.
pub(crate) struct Names {
    /// What stands between `tools[0]` and the fields of a tool.
    pub(crate) tool: &'static str,
    pub(crate) parameters: &'static str,
    pub(crate) choice: &'static str,
    pub(crate) choice_name: &'static str,
    pub(crate) effort: &'static str,
    pub(crate) budget: &'static str,
    pub(crate) messages: &'static str,
}

impl Names {
    fn field(&self, place: &Place) -> String {
        match place {
            Place::Message(index) => format!("{}[{index}]", self.messages),
            Place::Tools => "tools".to_owned(),
            Place::Tool(index, ToolField::Name) => format!("tools[{index}]{}.name", self.tool),
            Place::Tool(index, ToolField::Parameters(path)) => {
                format!("tools[{index}]{}.{}{path}", self.tool, self.parameters)
            }
            Place::Choice => self.choice.to_owned(),
            Place::ChoiceName => self.choice_name.to_owned(),
            Place::Effort => self.effort.to_owned(),
            Place::Budget => self.budget.to_owned(),
        }
    }

    /// The fault in the API's words.
    pub(crate) fn fault(&self, fault: &fornax_chat::Fault) -> Fault {
        let field = self.field(&fault.place);
        match &fault.got {
            Some(got) => Fault::value(field, &fault.rule, got),
            None => Fault::rule(field, &fault.rule),
        }
    }

    /// Tools of a request, if it has any that may be called.
    pub(crate) fn tools(
        &self,
        definitions: &[Definition],
        choice: &Choice,
        parallel: Option<bool>,
        faults: &mut Vec<Fault>,
    ) -> Option<Tools> {
        match Tools::new(definitions, choice) {
            Ok(tools) => tools.map(|tools| tools.parallel(parallel)),
            Err(wrong) => {
                faults.extend(wrong.iter().map(|fault| self.fault(fault)));
                None
            }
        }
    }

    fn error(&self, error: Error, served: &Served) -> ApiError {
        match error {
            Error::Asked(faults) => ApiError::faults(faults.iter().map(|fault| self.fault(fault)).collect()),
            Error::NoTemplate(reason) => ApiError::new(Code::ModelUnsupported, reason),
            Error::ToolsUnsupported(reason) => {
                let message = format!("the chat template of {:?} {reason}", served.card.name);
                let faults = vec![Fault::rule("tools", reason)];
                ApiError { faults, ..ApiError::new(Code::ModelUnsupported, message) }
            }
            Error::Form(error) => ApiError::form("tools", &error),
            Error::Said { field, error } => ApiError::form(field, &error),
            Error::Unseen(Unseen::Failed(_)) => ApiError::new(Code::Internal, error.to_string()),
            Error::Unseen(_) => ApiError::new(Code::ExecutionTimeout, error.to_string()),
            Error::Refused(refusal) => refusal.into(),
            Error::Text(error) => error.into(),
        }
    }
}

impl ChatAsk<'_> {
    /// The question for the engine. Renders, encodes and compiles: not for an async thread.
    pub(crate) fn ask(self, served: &Preparing<'_>) -> Result<Ask, ApiError> {
        let compile = |form: &_| served.compile(form);
        let context = served.engine.capacity().context;
        let bounds = Bounds {
            // Whoever counts wants to know by how much it is too long.
            context: if self.counts { usize::MAX } else { context },
            go_on: &|| served.check().is_ok(),
        };
        let model = Model {
            tokenizer: &served.tokenizer,
            template: (*served.template).as_ref(),
            asks_anew: served.asks_anew,
            sight: served.sight.as_deref().map_err(|reason| *reason),
            bounds,
        };
        let wrong = |error| self.names.error(error, served);
        self.question.check(model).map_err(wrong)?;
        check_length(served, self.question.conversation.bytes())?;
        let Prepared { prompt, shown, form, reading } =
            self.question.prepare(model, &compile).map_err(wrong)?;
        let wanted = Wanted {
            prompt,
            max_tokens: self.max_tokens,
            form,
            top_logprobs: self.top_logprobs,
            starts_text: true,
            reading: Some(reading),
        };
        // Before the turn of preparing is over: looking at pictures ends it, and forms are compiled within one.
        let mut ask = self.params.ask(served, wanted)?;
        if let Ok(sight) = model.sight
            && !self.counts
            && !shown.is_empty()
        {
            let tokens: usize = shown.iter().map(|shown| shown.at.len()).sum();
            let (pieces, share) = served.look(tokens.saturating_mul(sight.row_bytes()), |owner, go_on| {
                shown.iter().map(|shown| shown.look(sight, owner, go_on).map_err(wrong)).collect()
            })?;
            ask.request.pieces = pieces;
            ask.held = Some(Arc::new(share));
        }
        Ok(ask)
    }
}
