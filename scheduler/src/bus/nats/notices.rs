//! Core messages that are told and heard live and never stored.

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;

use super::NatsBus;
use crate::ports::BusError;

impl NatsBus {
    pub(super) async fn send_notice(&self, subject: String, body: Bytes) {
        self.api.send(subject, body).await;
    }

    pub(super) async fn subscribe_notices(
        &self,
        subject: &str,
    ) -> Result<BoxStream<'static, (String, Bytes)>, BusError> {
        let subscriber = self.api.subscribe(subject.to_owned()).await?;
        Ok(subscriber.map(|message| (message.subject.to_string(), message.payload)).boxed())
    }
}
